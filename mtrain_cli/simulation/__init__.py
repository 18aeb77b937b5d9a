"""Count, price and play a plan without running it; replay recorded indices in other setups."""
