"""Low-rank adapters of `train.lora` on models of transformers, by an entry point."""
