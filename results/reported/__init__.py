"""What the papers report, one CSV file a paper; see README.md beside this file."""
