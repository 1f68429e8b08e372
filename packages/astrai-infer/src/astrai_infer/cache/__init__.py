"""The paged KV cache: pages, slots and the pool that owns both."""
