"""Several models beside each other: methods at one size, sizes of one model, each row kept as it is measured."""
