"""Count, price and simulate a plan without running it; replay recorded indices in other setups."""
