import os
import sys

from tt_registry.cli import main

sys.exit(main(sys.argv[1:], os.environ))
