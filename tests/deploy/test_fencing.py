"""A fenced process has released all its resources."""

import socket
import subprocess
import sys

from tests.deploy.test_serve import free_port

from moeyard.fleet.ray.processes import began_of, kill_process

# It holds a port, memory that takes time to free, and threads; the first thread ends first.
HOLDS = """
import mmap, socket, sys, threading, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
memory = mmap.mmap(-1, 256 << 20)
memory.write(bytes(256 << 20))
for _ in range(64):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("held", flush=True)
time.sleep(60)
"""


def test_resources_of_a_killed_process_are_free() -> None:
    """A zombie's threads may keep its port for milliseconds."""
    for _ in range(3):
        port = free_port()
        process = subprocess.Popen([sys.executable, "-c", HOLDS, str(port)], stdout=subprocess.PIPE, text=True)
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            kill_process(process.pid, began_of(process.pid))
            socket.create_server(("127.0.0.1", port)).close()
            process.wait()


def test_reused_process_number_is_left_alone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        kill_process(process.pid, began_of(process.pid) - 1)
        assert process.poll() is None
        kill_process(process.pid, began_of(process.pid))
        assert process.wait() < 0
