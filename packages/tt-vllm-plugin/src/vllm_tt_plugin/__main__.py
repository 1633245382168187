import sys

from vllm_tt_plugin.cli import main

sys.exit(main())
