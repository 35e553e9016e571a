"""What a routing rule does to the load of its experts: run for real on seeded data, and in a short training."""
