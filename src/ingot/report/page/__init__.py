"""The report of runs in a browser: one HTML file without a network, or a live page on this machine."""
