"""What the small Whisper hears, and what SGLang's processor needs of it: a feature extractor, and tokens with names."""

import io
import wave
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from small_models import HEARING, VOCABULARY, WHISPER

_RATE, _SECONDS = 16000, 2
#: What SGLang lets the decoder begin with, whatever a request says.
PROMPT = [WHISPER["decoder_start_token_id"], 3, 4, 5]
_NAMES = {3: "<|en|>", 4: "<|transcribe|>", 5: "<|notimestamps|>"}
_WORDS = dict(pad_token="0", bos_token="1", eos_token="2", unk_token="0")


def save(path: Path) -> None:
    words = tokenizers.models.WordLevel({_NAMES.get(i, str(i)): i for i in range(VOCABULARY)}, unk_token="0")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), **_WORDS).save_pretrained(path)
    transformers.WhisperFeatureExtractor(**HEARING, processor_class="WhisperProcessor").save_pretrained(path)


def sound(seed: int) -> bytes:
    """A WAV file of tones, which change ten times a second and are the same in every run."""
    pitches = np.random.default_rng(seed).uniform(100, 4000, 10 * _SECONDS).repeat(_RATE // 10)
    samples = 8000 * np.sin(2 * np.pi * np.cumsum(pitches) / _RATE)
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setparams((1, 2, _RATE, 0, "NONE", None))
        audio.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


def features(path: Path, seed: int) -> torch.Tensor:
    """What the encoder is given for a sound."""
    with wave.open(io.BytesIO(sound(seed)), "rb") as audio:
        samples = np.frombuffer(audio.readframes(audio.getnframes()), dtype="<i2") / 32768
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(path)
    return extractor(samples, sampling_rate=_RATE, padding="max_length", return_tensors="pt")["input_features"]
