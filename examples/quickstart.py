"""How do I get text from Python? Runs on a CPU with the demo model, or with the checkpoint named as argument."""

import sys

from jaxllm import LLM, SamplingParams


def main(model: str) -> None:
    """Generate for a batch, stream one text, and chat."""
    # Small limits and lazy compilation: this program sends a handful of short requests and ends.
    llm = LLM(model, max_num_seqs=4, max_model_len=512, enforce_eager=True)

    greedy = SamplingParams(temperature=0, max_tokens=20)
    for output in llm.generate(["The sea is", "Once upon a time"], greedy):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")

    for delta in llm.stream("The stars are", SamplingParams(temperature=0.8, seed=1, max_tokens=20)):
        print(delta.text, end="", flush=True)
    print()

    question = [{"role": "user", "content": "What is the capital of France?"}]
    print(llm.chat(question, greedy)[0].outputs[0].text)
    print(llm.stats.scheduler)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
