"""Words in a device's memory, int32, by which the streams of a group, their kernels and copies tell
each other what has come, and what has not.
"""

FAILED = 0  # whether a wait has ended without what it waited for: no other waits after it
ARRIVED = 1  # how many pieces of the keys that are being copied have arrived
LATE = 2  # the piece that a kernel waited for until the time-out
COPIED = 3  # how many programs of a launch have copied: the last one meets other GPUs
WORDS = 4
