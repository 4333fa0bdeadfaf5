"""Elementary image operations and the policies that draw them."""
