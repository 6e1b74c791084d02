"""The one time limit of the tests: it ends a test that hangs, however slow the machine is."""

# Five times what the slowest step of a test takes beside four busy processes on two cores.
HANG_SECONDS = 120.0
