"""vLLM platform plugin for Tenstorrent accelerators.

vLLM finds it through its entry points, and users configure it with data, so nothing is imported from here.
Nothing is imported here either: a failure would keep ``entrypoints`` from loading, and vLLM would go on
without the plugin in silence.
"""

__all__: list[str] = []
