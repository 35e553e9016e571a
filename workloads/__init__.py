"""What is computed: gates, layer shapes, routing, hardware, topologies and suites, as data."""
