"""The calls that are made on an adapter class, as data: the one place where the contract is spelled out.

Arguments are passed by keyword under exactly these names, with two exceptions. The handles of
`read_decode_output` and `process_decode_output_host` come first and by position. The `leading` arguments of
loading and allocation come by position too, since adapters in use forward them to helpers under other names,
but by keyword to a method that takes them only so.
"""

import attrs

from tt_registry.capabilities import Capabilities

RELOAD_COMMANDS = ("reload_inputs", "reload_page_table", "reload_sampling_params", "reset_sampling_state")
ALLOCATORS = ("allocate_kv_cache", "allocate_kv_cache_per_layer")
OUTPUT_PAIR = ("read_decode_output", "process_decode_output_host")


@attrs.frozen
class Call:
    """One method and what it is sent: `leading` first, `always` every time, `sometimes` where needed."""

    method: str
    always: tuple[str, ...] = ()
    sometimes: tuple[str, ...] = ()
    leading: tuple[str, ...] = ()
    positional: int = 0
    on_class: bool = False
    required: bool = True


def contract_calls(capabilities: Capabilities) -> tuple[Call, ...]:
    """Every call that a class with these capabilities may receive.

    What depends on the served model alone is left out, since no class declares it: `pixel_values`,
    `image_grid_thw`, `rope_deltas_all_users`.
    """
    return (
        Call(
            "initialize_vllm_model",
            ("max_seq_len", "tt_data_parallel", "optimizations"),
            leading=("hf_config", "mesh_device", "max_batch_size"),
            on_class=True,
        ),
        Call(
            "get_max_tokens_all_users",
            ("model_name", "num_devices", "tt_data_parallel", "max_model_len", "max_num_seqs"),
            on_class=True,
            required=False,
        ),
        Call("get_kv_cache_spec", leading=("vllm_config",), on_class=True, required=False),
        Call("allocate_kv_cache", leading=("shape", "dtype", "num_layers"), required=False),
        Call("allocate_kv_cache_per_layer", leading=("per_layer_specs",), required=False),
        Call("warmup_model_prefill", ("kv_cache", "enable_trace", "can_sample_on_device")),
        Call(
            "warmup_model_decode",
            ("kv_cache", "max_batch_size", "num_blocks", "can_sample_on_device", "enable_trace"),
        ),
        _prefill_call(capabilities),
        _decode_call(capabilities),
        Call("read_decode_output", ("async_read",), positional=1, required=False),
        Call("process_decode_output_host", ("is_tokens",), positional=1, required=False),
    )


def _prefill_call(capabilities: Capabilities) -> Call:
    always = ("tokens", "page_table", "kv_cache", "enable_trace", "prompt_lens", "start_pos", "empty_slots")
    sometimes: tuple[str, ...] = ()
    if capabilities.supports_sample_on_device:
        sometimes += ("sampling_params",)
    if capabilities.hybrid_kv_cache_groups:
        sometimes += ("page_tables_per_layer",)
    return Call("prefill_forward", always, sometimes)


def _decode_call(capabilities: Capabilities) -> Call:
    version_1 = capabilities.decode_input_update_contract == 1
    always: tuple[str, ...] = (
        "tokens",
        "page_table",
        "kv_cache",
        "start_pos",
        "enable_trace",
        "read_from_device",
    )
    if version_1:
        always += RELOAD_COMMANDS
    sometimes: tuple[str, ...] = ()
    if capabilities.supports_sample_on_device:
        sometimes += ("sampling_params",) if version_1 else ("sampling_params", "reset_batch")
        if capabilities.supports_device_penalties:
            sometimes += ("prompt_tokens", "output_tokens")
    if capabilities.hybrid_kv_cache_groups:
        sometimes += ("page_tables_per_layer",)
    if capabilities.rows_must_be_packed:
        sometimes += ("slot_remap",)
    return Call("decode_forward", always, sometimes)
