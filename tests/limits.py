"""The tests' single time limit, which ends a test that hangs on any machine."""

# Five times the slowest step of a test next to four busy processes on two cores.
HANG_SECONDS = 120.0
