"""One self-contained HTML file that a stranger can read."""
