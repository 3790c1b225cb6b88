"""Where other libraries meet tilewise. Nothing here is imported with the package: ask by name."""
