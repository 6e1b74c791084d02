"""`python -m moeyard`."""

import sys

from moeyard.cli import main

sys.exit(main())
