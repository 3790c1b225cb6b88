"""What users call, until a method computes it: arguments, the choice of a method, contexts."""
