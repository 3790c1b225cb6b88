"""The command line: `tilewise info`, `verify`, `explain`, `tune`, `mask`, `hub`."""
