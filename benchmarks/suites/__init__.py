"""One module a suite: ``CASES``, ``PEERS`` and ``run(settings)``."""
