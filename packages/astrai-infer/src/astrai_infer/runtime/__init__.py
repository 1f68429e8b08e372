"""Lists to tensors to tokens: the step on the device."""
