"""`python -m moeyard`."""

import sys

from moeyard.entry import main

sys.exit(main())
