"""The library in ten lines: several prompts in one batch, then one answer as it comes."""

from genserve import LLM

with LLM("smollm2") as llm:
    prompts = ["The capital of France is", "Water boils at"]
    for result in llm.generate(prompts, max_tokens=12, temperature=0):
        print(repr(result.text), result.usage.completion_tokens, "tokens")
    question = [{"role": "user", "content": "Name three colours."}]
    for delta in llm.stream_chat(question, max_tokens=32, temperature=0):
        print(delta.text, end="", flush=True)
print()
