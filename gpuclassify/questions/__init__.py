"""The decoder wing: content safety by LlamaGuard and its adapters."""
