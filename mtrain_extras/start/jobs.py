"""The jobs of `mtrain init`."""

JOBS = {
    "text": "train a small model on your own text",
    "chat": "teach a Hugging Face model to answer, from your own conversations",
    "extend": "extend a Hugging Face model to longer sequences, with sparse attention",
    "lora": "adapt a Hugging Face model with LoRA",
    "profile": "measure a cluster: links, and which workers wait",
}
WITH_MODEL = ("chat", "extend", "lora")
