"""What is optimised: from a batch to a loss that is summed over its supervised tokens."""
