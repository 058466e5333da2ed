"""Attention over paged KV: one contract (`backend.AttentionBackend`), several implementations."""
