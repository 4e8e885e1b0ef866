"""Weighted sums of products over tokens, and how much each token counts in them."""
