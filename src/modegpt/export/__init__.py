"""Other forms of a compressed model: today, the stock classes of its dense family."""
