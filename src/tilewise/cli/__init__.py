"""The command line: `tilewise info`, `verify`, `demo`, `bench`, `tune`."""
