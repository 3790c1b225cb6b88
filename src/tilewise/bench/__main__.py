"""`python -m tilewise.bench` is `tilewise bench`."""

from tilewise.cli.bench import bench

if __name__ == "__main__":
    bench(prog_name="python -m tilewise.bench")
