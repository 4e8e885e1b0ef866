"""What a user calls MODEL: opened whole, or block by block from its files."""
