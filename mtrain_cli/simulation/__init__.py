"""What a plan costs, without running it: work counts, and what other layouts, exchanges and worker counts would give."""
