"""Runs cases on one backend and writes what they gave as JSON: `engine.py BACKEND MODELS OUTPUT CASE...`.

A process of its own, since SGLang reads its environment once. Its engine has further processes, for the scheduler with
the model among them. Cases are those of cases.py.
"""

import json
import os
import sys
from pathlib import Path

# Triton's products in float32 are to be those of float32, not of its upper 19 bits.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
# The same of cuDNN's, which Whisper's encoder has.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

sys.path.append(str(Path(__file__).parents[2] / "testing"))

import cases  # noqa: E402
import hearing  # noqa: E402
import models  # noqa: E402
import small_models  # noqa: E402

#: A small pool on a GPU, which others may be using.
_SIZES = dict(max_total_tokens=8192, mem_fraction_static=0.5)


def run(case: cases.Case, backend: str, folder: Path) -> list[dict]:
    """What a case gives for each of its prompts: tokens, the logprobs of all that could stand there, and how many steps
    verified drafts."""
    import sglang

    options = dict(_SIZES, skip_tokenizer_init=True, log_level="error", random_seed=0) | case.options
    if case.draft:
        options["speculative_draft_model_path"] = str(models.save(case.draft, folder))
    engine = sglang.Engine(model_path=str(models.save(case.model, folder)), attention_backend=backend, **options)
    try:
        return [answer for _ in range(case.rounds) for answer in generate(engine, case)]
    finally:
        engine.shutdown()


def generate(engine, case: cases.Case) -> list[dict]:
    answers = engine.generate(
        input_ids=case.prompts(),
        sampling_params=dict(temperature=0, max_new_tokens=case.max_tokens, ignore_eos=True),
        return_logprob=True,
        token_ids_logprob=[list(range(small_models.VOCABULARY))] * len(case.lengths),
        **dict(audio_data=[hearing.sound(i) for i in range(len(case.lengths))]) if case.hears else {},
    )
    return [
        dict(
            tokens=list(answer["output_ids"]),
            logprobs=[[entry[0] for entry in step] for step in answer["meta_info"]["output_token_ids_logprobs"]],
            verified=answer["meta_info"].get("spec_verify_ct", 0),
            cached=answer["meta_info"]["cached_tokens"],
        )
        for answer in answers
    ]


def main() -> None:
    backend, folder, output, *names = sys.argv[1:]
    results = {}
    for name in names:
        try:
            results[name] = run(cases.CASES[name], backend, Path(folder))
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
        Path(output).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
