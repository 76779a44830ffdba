"""Architectures of transformers, with random weights and tiny configurations; nothing is downloaded.

They are called as their users call them, with keyword arguments, and answer with their own dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from bench.zoo.entry import Field, Shelf, ids, mask, real

ENCODERS = Shelf(group="encoder", sizes={"batch": 3, "length": 9})
DECODERS = Shelf(group="decoder", sizes={"batch": 3, "length": 9})
PAIRS = Shelf(group="seq2seq", sizes={"batch": 3, "length": 9, "steps": 5})
VISION = Shelf(group="vision", sizes={"batch": 3, "height": 64, "width": 96})
AUDIO = Shelf(group="audio", sizes={"batch": 3, "samples": 800, "frames": 40})
OTHERS = Shelf(group="multimodal", sizes={"batch": 3, "length": 9})
SHELVES = [ENCODERS, DECODERS, PAIRS, VISION, AUDIO, OTHERS]

VOCABULARY = 60
TEXT: Mapping[str, Field] = {"input_ids": ids(VOCABULARY, "batch", "length"), "attention_mask": mask("batch", "length")}
ONLY_IDS: Mapping[str, Field] = {"input_ids": ids(VOCABULARY, "batch", "length")}
DECODED: Mapping[str, Field] = {**TEXT, "decoder_input_ids": ids(VOCABULARY, "batch", "steps")}
FIXED: Mapping[str, Field] = {"pixel_values": real("batch", 3, 32, 32)}
ANY_SIZE: Mapping[str, Field] = {"pixel_values": real("batch", 3, "height", "width")}
WAVE: Mapping[str, Field] = {"input_values": real("batch", "samples")}

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CAUSAL = SMALL | {"num_key_value_heads": 1, "head_dim": 8, "use_cache": False}
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 48,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BOTH = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "use_cache": False,
}
IMAGE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
}


def of(model: str, config: str, settings: Mapping[str, Any]) -> Callable[[], torch.nn.Module]:
    """A builder of `transformers.MODEL` with a `transformers.CONFIG` of these settings."""

    def build() -> torch.nn.Module:
        chosen = getattr(transformers, config)(**settings)
        made: torch.nn.Module = getattr(transformers, model)(chosen)
        return made

    return build


def _encoders() -> None:
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
    for name, model, config, more in (
        ("bert", "BertModel", "BertConfig", {}),
        ("bert_classifier", "BertForSequenceClassification", "BertConfig", {"num_labels": 3}),
        ("roberta", "RobertaModel", "RobertaConfig", {"pad_token_id": 1, "bos_token_id": 0}),
        ("xlm_roberta_tagger", "XLMRobertaForTokenClassification", "XLMRobertaConfig", {"pad_token_id": 1}),
        ("albert", "AlbertModel", "AlbertConfig", {"embedding_size": 8}),
        ("electra", "ElectraModel", "ElectraConfig", {"embedding_size": 8}),
        ("mpnet", "MPNetModel", "MPNetConfig", {"pad_token_id": 1}),
        ("ernie", "ErnieModel", "ErnieConfig", {}),
        ("deberta", "DebertaModel", "DebertaConfig", relative),
        (
            "deberta_v2",
            "DebertaV2Model",
            "DebertaV2Config",
            {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        ),
        ("roformer", "RoFormerModel", "RoFormerConfig", {"embedding_size": 16}),
        ("modernbert", "ModernBertModel", "ModernBertConfig", {"cls_token_id": 1, "sep_token_id": 2}),
        ("convbert", "ConvBertModel", "ConvBertConfig", {"embedding_size": 16, "head_ratio": 1, "conv_kernel_size": 3}),
        ("rembert", "RemBertModel", "RemBertConfig", {"input_embedding_size": 8, "output_embedding_size": 8}),
        ("megatron_bert", "MegatronBertModel", "MegatronBertConfig", {}),
        ("layoutlm", "LayoutLMModel", "LayoutLMConfig", {}),
        ("esm", "EsmModel", "EsmConfig", {"mask_token_id": 3, "position_embedding_type": "rotary"}),
        ("squeezebert", "SqueezeBertModel", "SqueezeBertConfig", {"embedding_size": 16}),
    ):
        ENCODERS.add(name, of(model, config, {**SMALL, **more}), TEXT, keywords=True)
    more = {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    more |= {"max_position_embeddings": 48}
    ENCODERS.add("distilbert", of("DistilBertModel", "DistilBertConfig", more), TEXT, keywords=True)
    fnet = {**SMALL, "use_tpu_fourier_optimizations": False}
    ENCODERS.add("fnet", of("FNetModel", "FNetConfig", fnet), ONLY_IDS, keywords=True)
    funnel = {"vocab_size": VOCABULARY, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "block_sizes": [1, 1]}
    ENCODERS.add("funnel", of("FunnelModel", "FunnelConfig", funnel), TEXT, keywords=True)
    xlnet = {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "use_mems_eval": False}
    ENCODERS.add("xlnet", of("XLNetModel", "XLNetConfig", xlnet), TEXT, keywords=True)
    landmarks = {**SMALL, "num_landmarks": 8, "segment_means_seq_len": 8}  # fewer fail with any mask in transformers 5
    fixed = {"input_ids": ids(VOCABULARY, "batch", 8), "attention_mask": mask("batch", 8)}
    ENCODERS.add("nystromformer", of("NystromformerModel", "NystromformerConfig", landmarks), fixed, keywords=True)
    mobile = {**SMALL, "embedding_size": 16, "intra_bottleneck_size": 8, "num_feedforward_networks": 2}
    ENCODERS.add("mobilebert", of("MobileBertModel", "MobileBertConfig", mobile), TEXT, keywords=True)


def _decoders() -> None:
    for name, model, config, more in (
        ("llama", "LlamaForCausalLM", "LlamaConfig", {}),
        ("mistral", "MistralForCausalLM", "MistralConfig", {"sliding_window": 6}),
        ("qwen2", "Qwen2ForCausalLM", "Qwen2Config", {}),
        ("qwen3", "Qwen3ForCausalLM", "Qwen3Config", {}),
        ("gemma", "GemmaForCausalLM", "GemmaConfig", {}),
        ("gemma2", "Gemma2ForCausalLM", "Gemma2Config", {"sliding_window": 6, "query_pre_attn_scalar": 8}),
        ("phi", "PhiForCausalLM", "PhiConfig", {"num_key_value_heads": 2}),
        ("stablelm", "StableLmForCausalLM", "StableLmConfig", {}),
        ("olmo", "OlmoForCausalLM", "OlmoConfig", {}),
        ("granite", "GraniteForCausalLM", "GraniteConfig", {}),
        ("mixtral", "MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 3, "num_experts_per_tok": 2}),
        ("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    ):
        DECODERS.add(name, of(model, config, {**CAUSAL, **more}), TEXT, keywords=True)
    DECODERS.add("gpt2", of("GPT2LMHeadModel", "GPT2Config", GPT), TEXT, keywords=True)
    codegen = {**GPT, "rotary_dim": 4, "n_head": 4, "n_ctx": 48}
    DECODERS.add("codegen", of("CodeGenForCausalLM", "CodeGenConfig", codegen), TEXT, keywords=True)
    neo = {**SMALL, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4}
    neo |= {"use_cache": False}
    DECODERS.add("gpt_neo", of("GPTNeoForCausalLM", "GPTNeoConfig", neo), TEXT, keywords=True)
    opt = {**SMALL, "ffn_dim": 24, "word_embed_proj_dim": 16, "use_cache": False, "pad_token_id": 1}
    DECODERS.add("opt", of("OPTForCausalLM", "OPTConfig", opt), TEXT, keywords=True)
    bloom = {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2, "use_cache": False}
    DECODERS.add("bloom", of("BloomForCausalLM", "BloomConfig", bloom), TEXT, keywords=True)
    falcon = {**SMALL, "use_cache": False, "alibi": False, "new_decoder_architecture": False}
    DECODERS.add("falcon", of("FalconForCausalLM", "FalconConfig", falcon), TEXT, keywords=True)
    mamba = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "use_cache": False}
    DECODERS.add("mamba", of("MambaForCausalLM", "MambaConfig", mamba), ONLY_IDS, keywords=True)


def _pairs() -> None:
    t5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    t5 |= {"use_cache": False, "decoder_start_token_id": 0}
    PAIRS.add("t5", of("T5Model", "T5Config", t5), DECODED, keywords=True)
    PAIRS.add("t5_encoder", of("T5EncoderModel", "T5Config", t5), TEXT, keywords=True)
    for name, model, config in (
        ("bart", "BartModel", "BartConfig"),
        ("mbart", "MBartModel", "MBartConfig"),
        ("pegasus", "PegasusModel", "PegasusConfig"),
        ("marian", "MarianMTModel", "MarianConfig"),
        ("blenderbot", "BlenderbotModel", "BlenderbotConfig"),
        ("m2m_100", "M2M100Model", "M2M100Config"),
    ):
        PAIRS.add(name, of(model, config, BOTH), DECODED, keywords=True)


def _vision() -> None:
    for name, model, config, more in (
        ("vit", "ViTForImageClassification", "ViTConfig", {}),
        ("deit", "DeiTModel", "DeiTConfig", {}),
        ("beit", "BeitModel", "BeitConfig", {}),
        ("dinov2", "Dinov2Model", "Dinov2Config", {}),
        ("ijepa", "IJepaModel", "IJepaConfig", {}),
        ("yolos", "YolosForObjectDetection", "YolosConfig", {"image_size": [32, 32], "num_detection_tokens": 4}),
        ("vit_msn", "ViTMSNModel", "ViTMSNConfig", {}),
        ("siglip_vision", "SiglipVisionModel", "SiglipVisionConfig", {}),
    ):
        VISION.add(name, of(model, config, {**IMAGE, **more}), FIXED, keywords=True)
    convolutional = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    VISION.add("hf_resnet", of("ResNetModel", "ResNetConfig", convolutional), ANY_SIZE, keywords=True)
    regnet = {**convolutional, "groups_width": 8}
    VISION.add("regnet", of("RegNetModel", "RegNetConfig", regnet), ANY_SIZE, keywords=True)
    convnext = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
    VISION.add("hf_convnext", of("ConvNextModel", "ConvNextConfig", convnext), ANY_SIZE, keywords=True)
    VISION.add("convnextv2", of("ConvNextV2Model", "ConvNextV2Config", convnext), ANY_SIZE, keywords=True)
    mobile = {"depth_multiplier": 0.25, "min_depth": 4, "finegrained_output": False}
    VISION.add("mobilenet_v1", of("MobileNetV1Model", "MobileNetV1Config", mobile), ANY_SIZE, keywords=True)
    mobile |= {"depth_divisible_by": 4}
    VISION.add("mobilenet_v2", of("MobileNetV2Model", "MobileNetV2Config", mobile), ANY_SIZE, keywords=True)
    swin = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
    VISION.add("swin", of("SwinModel", "SwinConfig", swin), ANY_SIZE, keywords=True, height=32, width=48)
    segformer = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_encoder_blocks": 2, "sr_ratios": [2, 1]}
    segformer |= {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    segformer |= {"decoder_hidden_size": 8}
    VISION.add(
        "segformer", of("SegformerForSemanticSegmentation", "SegformerConfig", segformer), ANY_SIZE, keywords=True
    )
    pool = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2, "patch_sizes": [7, 3]}
    pool |= {"strides": [4, 2], "padding": [2, 1]}
    VISION.add("poolformer", of("PoolFormerModel", "PoolFormerConfig", pool), ANY_SIZE, keywords=True)
    pvt = {"image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1], "sequence_reduction_ratios": [2, 1]}
    pvt |= {"hidden_sizes": [8, 16], "patch_sizes": [4, 2], "strides": [4, 2], "num_attention_heads": [1, 2]}
    pvt |= {"mlp_ratios": [2, 2]}
    VISION.add("pvt", of("PvtModel", "PvtConfig", pvt), FIXED, keywords=True)
    VISION.add("mobilevit", of("MobileViTModel", "MobileViTConfig", _mobilevit()), ANY_SIZE, keywords=True)
    VISION.add("detr", _detr, ANY_SIZE, keywords=True)


def _mobilevit() -> dict[str, Any]:
    return {
        "hidden_sizes": [8, 12, 16],
        "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 16],
        "num_attention_heads": 2,
        "image_size": 64,
    }


def _detr() -> torch.nn.Module:
    """A detector on a ResNet of transformers' own."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    config = transformers.DetrConfig(
        backbone_config=backbone,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_queries=4,
    )
    return transformers.DetrForObjectDetection(config)


def _audio() -> None:
    wave = {**SMALL, "conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 8]}
    wave |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"}
    for name, model, config in (
        ("wav2vec2", "Wav2Vec2Model", "Wav2Vec2Config"),
        ("hubert", "HubertModel", "HubertConfig"),
        ("wavlm", "WavLMModel", "WavLMConfig"),
        ("data2vec_audio", "Data2VecAudioModel", "Data2VecAudioConfig"),
    ):
        AUDIO.add(name, of(model, config, wave), WAVE, keywords=True)
    AUDIO.add("wav2vec2_ctc", of("Wav2Vec2ForCTC", "Wav2Vec2Config", wave), WAVE, keywords=True)
    spectrum = {**IMAGE, "max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8}
    AUDIO.add(
        "audio_spectrogram",
        of("ASTModel", "ASTConfig", spectrum),
        {"input_values": real("batch", 32, 16)},
        keywords=True,
    )
    whisper = {**BOTH, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 24}
    AUDIO.add(
        "whisper",
        of("WhisperModel", "WhisperConfig", whisper),
        {"input_features": real("batch", 8, 32), "decoder_input_ids": ids(VOCABULARY, "batch", "steps")},
        keywords=True,
        steps=5,
    )
    speech = {**BOTH, "input_feat_per_channel": 8, "input_channels": 1, "conv_channels": 8, "num_conv_layers": 1}
    speech |= {"conv_kernel_sizes": [5], "max_source_positions": 64, "max_target_positions": 24}
    AUDIO.add(
        "speech_to_text",
        of("Speech2TextModel", "Speech2TextConfig", speech),
        {"input_features": real("batch", "frames", 8), "decoder_input_ids": ids(VOCABULARY, "batch", "steps")},
        keywords=True,
        steps=5,
    )


def _others() -> None:
    text = {**SMALL, "projection_dim": 8}
    clip = {"text_config": text, "vision_config": IMAGE, "projection_dim": 8}
    OTHERS.add("clip_vision", of("CLIPVisionModel", "CLIPVisionConfig", IMAGE), FIXED, keywords=True)
    OTHERS.add("clip_text", of("CLIPTextModel", "CLIPTextConfig", {**SMALL, "eos_token_id": 2}), TEXT, keywords=True)
    OTHERS.add("clip", of("CLIPModel", "CLIPConfig", clip), {**TEXT, **FIXED}, keywords=True)
    OTHERS.add("siglip", of("SiglipModel", "SiglipConfig", clip), {**TEXT, **FIXED}, keywords=True)
    vilt = {**SMALL, **IMAGE, "modality_type_vocab_size": 2}
    OTHERS.add("blip_text", of("BlipTextModel", "BlipTextConfig", {**SMALL, "is_decoder": False}), TEXT, keywords=True)
    OTHERS.add("vilt", of("ViltModel", "ViltConfig", vilt), {**TEXT, **FIXED}, keywords=True)
    patches = {"context_length": 32, "patch_length": 8, "patch_stride": 8, "num_input_channels": 2, "d_model": 16}
    patches |= {"num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 24, "prediction_length": 4}
    OTHERS.add(
        "patchtst",
        of("PatchTSTForPrediction", "PatchTSTConfig", {**patches, "loss": "mse"}),
        {"past_values": real("batch", 32, 2)},
        keywords=True,
    )
    OTHERS.add(
        "patchtsmixer",
        of("PatchTSMixerForPrediction", "PatchTSMixerConfig", {**patches, "num_layers": 1, "loss": "mse"}),
        {"past_values": real("batch", 32, 2)},
        keywords=True,
    )


for _fill in (_encoders, _decoders, _pairs, _vision, _audio, _others):
    _fill()
