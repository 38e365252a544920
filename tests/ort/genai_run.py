"""Runs one model folder in onnxruntime-genai, in a process of its own, and prints the greedy tokens as JSON.

genai brings its own registration and environment, so test_genai.py starts this file instead of importing it.
"""

import argparse
import importlib
import json

import numpy as np
import onnxruntime_genai as og

# The wheel's module -> what genai_config.json calls the provider. Under the name "cuda" genai keeps its tensors on the
# GPU and samples there.
PROVIDERS = {"nxrt_ep_cpu": "NxrtCpuExecutionProvider", "nxrt_ep_cuda": "cuda"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--ep", choices=PROVIDERS, help="the wheel; without it genai runs on ORT's CPU EP")
    parser.add_argument("--library", help="the CPU EP's library, if not the wheel's")
    parser.add_argument("--option", action="append", default=[], help="provider option KEY=VALUE")
    parser.add_argument("--prompts", required=True, help="JSON: one token list a sequence")
    parser.add_argument("--append", help="JSON: more prompt tokens, appended after the first call")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--synchronize", choices=("true", "false"), default="true", help="whether each Run waits for its end")
    parser.add_argument("--share", choices=("true", "false"), default="true")
    arguments = parser.parse_args()

    config = og.Config(arguments.folder)
    config.clear_providers()
    if arguments.ep:
        provider = PROVIDERS[arguments.ep]
        if arguments.library:
            og.register_execution_provider_library(provider, arguments.library)
        else:
            importlib.import_module(arguments.ep).register_genai()
        config.append_provider(provider)
        for option in arguments.option:
            config.set_provider_option(provider, *option.split("=", 1))
        # No node may fall back to ORT's CPU EP unnoticed.
        entries = {"session.disable_cpu_ep_fallback": "1"}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": entries}}}))
    if arguments.synchronize == "false":
        entries = {"disable_synchronize_execution_providers": "1"}
        config.overlay(json.dumps({"model": {"decoder": {"run_options": entries}}}))
    model = og.Model(config)

    prompts = np.array(json.loads(arguments.prompts), np.int32)
    more = json.loads(arguments.append) if arguments.append else []
    length = prompts.shape[1] + len(more) + arguments.tokens
    params = og.GeneratorParams(model)
    params.set_search_options(
        max_length=length,
        min_length=length,  # the end token is a token like any other here
        do_sample=False,
        batch_size=len(prompts),
        past_present_share_buffer=arguments.share == "true",
    )
    generator = og.Generator(model, params)
    generator.append_tokens(prompts if len(prompts) > 1 else prompts[0])
    if more:
        generator.append_tokens(np.array(more, np.int32))
    tokens = []
    while not generator.is_done() and len(tokens) < arguments.tokens:
        generator.generate_next_token()
        tokens.append([int(t) for t in generator.get_next_tokens()])
    counters = importlib.import_module(arguments.ep).counters() if arguments.ep == "nxrt_ep_cuda" else {}
    print(json.dumps({"tokens": np.array(tokens).T.tolist(), "device": model.device_type, "counters": counters}))


if __name__ == "__main__":
    main()
