"""Where `tilewise.bench` is now: importing it raises an error that says so."""

raise ImportError("tilewise.bench is benchmarks.bench now, in a clone of tilewise's repository")
