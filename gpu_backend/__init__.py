"""The real engine: the same scheduler objects on torch and FlashInfer."""
