"""Make this folder's helper modules importable here and in the rank processes, which inherit sys.path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
