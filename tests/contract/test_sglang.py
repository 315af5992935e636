"""Everything of SGLang that AdaServe touches: an SGLang that moved one fails here, with its name."""

from __future__ import annotations

import functools
import inspect
import logging
import pkgutil
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points, requires, version
from types import SimpleNamespace
from typing import Any

import pytest

from adaserve import patches, sglang_compat
from adaserve.algorithm import AdaServeAlgorithm
from adaserve.host.device import select
from adaserve.patches.http.routes import REFUSED, ROUTES_ONLY
from adaserve.sglang_compat import NAME, SGLANG_VERSION

MANAGERS = "sglang.srt.managers"
OPENAI = "sglang.srt.entrypoints.openai"
PROCESSOR = "sglang.srt.multimodal.processors.base_processor.BaseMultimodalProcessor"
INTERNAL = f"{MANAGERS}.scheduler_components.internal_state.SchedulerInternalStateController"
TARGETS = {
    "sglang.srt.plugins.hook_registry._propagate_patch": ["original", "wrapped", "source_module"],
    "sglang.srt.server_args.ServerArgs.add_cli_args": ["parser"],
    "sglang.srt.server_args.ServerArgs.from_cli_args": ["args"],
    "uvicorn.server.Server.handle_exit": ["self", "sig", "frame"],
    "uvicorn.supervisors.multiprocess.Multiprocess.handle_int": ["self"],
    "uvicorn.supervisors.multiprocess.Multiprocess.handle_term": ["self"],
    f"{MANAGERS}.tokenizer_manager.SignalHandler.sigterm_handler": ["self"],
    "uvicorn.protocols.http.h11_impl.H11Protocol.__init__": ["self"],
    "torch.distributed.new_group": ["ranks", "timeout", "backend"],
    "sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode": [],
    "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len": [],
    f"{MANAGERS}.tp_worker.TpModelWorker.get_worker_info": ["self"],
    f"{MANAGERS}.utils.GenerationBatchResult.copy_to_cpu": ["self", "return_logprob", "return_hidden_states"],
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": [
        "req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size",
    ],
    "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add": [
        "hidden_states", "gate_weight", "shared_output", "final_hidden_states",
    ],
    "sglang.kernels.ops.activation.softcap.softcap_inplace_logits": [
        "full_logits", "final_logit_softcapping",
    ],
    "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator.__init__": ["self", "kvc"],
    "sglang.srt.managers.scheduler.get_exception_traceback": [],
    "sglang.srt.utils.common.kill_process_tree": ["parent_pid", "include_parent"],
    "sglang.srt.layers.dual_gemm.DualGemm._select_mode": ["self", "gate_up_proj", "hidden_size"],
    "sglang.srt.layers.sampler.apply_custom_logit_processor": ["logits", "sampling_batch_info"],
    "sglang.srt.sampling.custom_logit_processor._cache_from_str": ["json_str"],
    "sglang.srt.sampling.penaltylib.repetition_penalty.apply_scaling_penalties": [
        "logits", "scaling_penalties",
    ],
    "sglang.srt.distributed.device_communicators.triton_symm_mem_ag.recommended_max_tokens": [
        "include_prefill", "floor",
    ],
    f"{OPENAI}.serving_base.OpenAIServingBase.handle_request": ["self", "request", "raw_request"],
    f"{OPENAI}.serving_completions.OpenAIServingCompletion._generate_completion_stream": [
        "self", "adapted_request", "request", "raw_request",
    ],
    f"{OPENAI}.serving_chat.OpenAIServingChat._generate_chat_stream": [
        "self", "adapted_request", "request", "raw_request",
    ],
    f"{OPENAI}.serving_completions.OpenAIServingCompletion._build_completion_response": [
        "self", "request", "ret",
    ],
    f"{OPENAI}.serving_chat.OpenAIServingChat._build_chat_response": ["self", "request", "ret"],
    "sglang.srt.entrypoints.http_server.serve_generate_request": ["obj", "request"],
    f"{MANAGERS}.tokenizer_manager.TokenizerManager.generate_request": ["self", "obj", "request"],
    f"{MANAGERS}.tokenizer_manager.TokenizerManager._handle_batch_output": ["self", "recv_obj"],
    f"{PROCESSOR}.load_mm_data": ["self", "prompt"],
    f"{PROCESSOR}.process_and_combine_mm_data": ["self", "base_output", "mm_tokens"],
    f"{MANAGERS}.tokenizer_manager.TokenizerManager._wait_one_response": ["self", "obj", "request"],
    f"{MANAGERS}.tokenizer_manager.TokenizerManager.create_abort_task": ["self", "obj"],
    f"{MANAGERS}.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics": [
        "self", "meta_info", "recv_obj", "i",
    ],
    f"{MANAGERS}.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_decode_stats": [
        "self",
    ],
    f"{MANAGERS}.tokenizer_manager.TokenizerManager._handle_abort_finish_reason": [
        "self", "out", "state", "is_stream",
    ],
    f"{MANAGERS}.scheduler.Scheduler.handle_shutdown": ["self", "recv_req"],
    f"{MANAGERS}.scheduler.Scheduler.init_load_inquirer": ["self"],
    f"{MANAGERS}.scheduler.Scheduler.publish_load_snapshot": ["self", "force"],
    f"{MANAGERS}.scheduler.Scheduler.on_idle": ["self"],
    f"{MANAGERS}.scheduler.Scheduler._abort_on_queued_limit": ["self", "recv_req"],
    f"{MANAGERS}.scheduler.Scheduler.send_abort_output": ["self", "abort_req", "req"],
    f"{MANAGERS}.scheduler.Scheduler._poll_timeout_aborts": ["self"],
    f"{MANAGERS}.tokenizer_manager.TokenizerManager._validate_one_request": ["self", "obj", "input_ids"],
    f"{MANAGERS}.tokenizer_manager.TokenizerManager.open_session": ["self", "obj", "request"],
    f"{MANAGERS}.tokenizer_manager.TokenizerManager.close_session": ["self", "obj", "request"],
    **{
        f"sglang.srt.entrypoints.ollama.serving.OllamaServing.{answer}": [
            "self", "gen_request", "raw_request", "model_name",
        ]
        for answer in (
            "_generate_chat_response", "_generate_generate_response", "_stream_chat_response",
            "_stream_generate_response",
        )
    },
    "sglang.srt.entrypoints.ollama.serving.OllamaServing._convert_options_to_sampling_params": [
        "self", "options",
    ],
    f"{OPENAI}.serving_chat.OpenAIServingChat._convert_to_internal_request": [
        "self", "request", "raw_request",
    ],
    f"{OPENAI}.serving_chat.OpenAIServingChat._apply_jinja_template": ["self", "request", "tools"],
    f"{OPENAI}.serving_chat.OpenAIServingChat._validate_request": ["self", "request"],
    f"{OPENAI}.serving_tokenize.OpenAIServingDetokenize._handle_non_streaming_request": [
        "self", "adapted_request", "request", "raw_request",
    ],
    f"{OPENAI}.serving_chat.OpenAIServingChat._handle_streaming_request": [
        "self", "adapted_request", "request", "raw_request",
    ],
    f"{OPENAI}.serving_completions.OpenAIServingCompletion._handle_streaming_request": [
        "self", "adapted_request", "request", "raw_request",
    ],
    f"{OPENAI}.serving_responses.OpenAIServingResponses._generate_with_builtin_tools": [
        "self", "request_id", "request_prompt", "adapted_request",
    ],
    f"{OPENAI}.serving_responses.OpenAIServingResponses._build_response": ["request", "sampling_params"],
    f"{OPENAI}.serving_responses.OpenAIServingResponses.create_responses": ["self", "request", "raw_request"],
    "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._convert_response": ["self", "response"],
    "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._handle_streaming": [
        "self", "chat_request", "anthropic_request", "raw_request",
    ],
    "sglang.srt.entrypoints.anthropic.serving.AnthropicServing.handle_messages": [
        "self", "request", "raw_request",
    ],
    "sglang.srt.entrypoints.api_contract.generate_contract_error": ["body"],
    f"{MANAGERS}.scheduler.Scheduler._create_generation_req": ["self", "recv_req"],
    f"{MANAGERS}.scheduler.Scheduler.handle_generate_request": ["self", "recv_req", "mm_input_error"],
    f"{MANAGERS}.scheduler.Scheduler.abort_request": ["self", "recv_req"],
    f"{MANAGERS}.schedule_batch.Req._check_str_based_finish": ["self", "new_accepted_len"],
    f"{MANAGERS}.schedule_batch.Req.update_finish_state": ["self", "new_accepted_len"],
    "sglang.srt.sampling.sampling_params.get_max_seq_length": ["regex_str"],
    f"{MANAGERS}.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    "._accept_grammar_tokens": ["self", "req", "tokens"],
    f"{MANAGERS}.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    ".process_batch_result_prefill": ["self", "batch", "result"],
    f"{MANAGERS}.scheduler.Scheduler._release_aborted_request": ["self", "req"],
    "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend._init_value_dispatch": [
        "self", "key", "require_reasoning",
    ],
    "sglang.srt.sampling.penaltylib.min_new_tokens.BatchedMinNewTokensPenalizer._prepare": ["self"],
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo._apply_post_grammar_logits_transforms": [
        "self", "logits",
    ],
    "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.__init__": ["self"],
    "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.set_cache": ["self", "key", "value"],
    "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.get_cached_or_future_value": [
        "self", "key", "require_reasoning",
    ],
    "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend.__init__": [
        "self", "tokenizer", "vocab_size",
    ],
    "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend._new_framing_compiler": [
        "tokenizer_info",
    ],
    "sglang.srt.sampling.watermarking.core.redact_watermark_secrets": ["value", "in_watermark_config"],
    "sglang.srt.sampling.watermarking.core.redact_watermark_command_line": ["argv", "watermark_config"],
    f"{MANAGERS}.tokenizer_manager.TokenizerManager._server_args_for_dump": ["self"],
    "sglang.srt.utils.auth.decide_request_auth": [
        "method", "path", "authorization_header", "api_key", "admin_api_key", "auth_level",
    ],
    "sglang.srt.utils.common.add_prometheus_middleware": ["app"],
    "sglang.srt.constrained.grammar_manager.GrammarManager.get_ready_grammar_requests": ["self"],
    "sglang.srt.managers.scheduler.Scheduler._copy_result_to_cpu": ["self", "batch_result", "batch"],
    f"{MANAGERS}.tokenizer_manager.TokenizerManager._handle_open_session_req_output": ["self", "recv_obj"],
    "sglang.srt.session.session_controller.SessionController.open": ["self", "recv_req"],
    "sglang.srt.session.session_controller.SessionReqNode.clear": ["self", "req_dict"],
    "sglang.srt.session.session_controller.Session.create_req": ["self", "req"],
    f"{MANAGERS}.scheduler.Scheduler.get_output_streamer_class": ["self"],
    f"{MANAGERS}.scheduler.Scheduler.get_new_batch_prefill": ["self", "running_batch"],
    f"{MANAGERS}.scheduler.Scheduler.run_batch": ["self", "batch"],
    f"{MANAGERS}.scheduler.Scheduler.process_batch_result": ["self", "batch", "result"],
    f"{MANAGERS}.scheduler.Scheduler._reqs_finishing_inflight": ["self", "batch"],
    f"{MANAGERS}.scheduler.Scheduler._advance_pending_grammar": ["self"],
    f"{MANAGERS}.schedule_policy.PrefillAdder.__init__": ["self"],
    f"{MANAGERS}.schedule_policy.PrefillAdder.add_one_req": [
        "self", "req", "has_chunked_req", "truncation_align_size",
    ],
    "sglang.srt.observability.req_time_stats.APIServerReqTimeStats.__getstate__": ["self"],
    "sglang.srt.observability.req_time_stats.DPControllerReqTimeStats.__getstate__": ["self"],
    "sglang.srt.observability.req_time_stats.convert_time_cross_thread": [
        "time_value", "old_diff", "new_diff",
    ],
    f"{INTERNAL}._add_speculative": ["self", "state"],
    f"{INTERNAL}.get_internal_state": ["self", "recv_req"],
    f"{INTERNAL}.set_internal_state": ["self", "recv_req"],
    f"{MANAGERS}.tokenizer_manager.TokenizerManager.get_internal_state": ["self"],
    f"{MANAGERS}.tokenizer_manager.TokenizerManager.set_internal_state": ["self", "obj"],
    "sglang.srt.entrypoints.http_server._setup_and_run_http_server": ["server_args", "tokenizer_manager"],
    "sglang.srt.entrypoints.engine.Engine.collective_rpc": ["self", "method"],
    f"{MANAGERS}.tokenizer_manager.TokenizerManager.init_tokenizer_and_processor": ["self"],
    f"{MANAGERS}.tokenizer_manager.TokenizerManager._tokenize_texts": ["self", "texts"],
    f"{MANAGERS}.tokenizer_manager_score_mixin.TokenizerManagerScoreMixin.score_request": [
        "self", "query", "items",
    ],
    f"{OPENAI}.serving_decisions._encode_all": ["encoded"],
    f"{OPENAI}.serving_rerank.OpenAIServingRerank._validate_request": ["self", "request"],
    f"{OPENAI}.serving_rerank._get_jinja_env": [],
    f"{OPENAI}.serving_responses.OpenAIServingResponses._make_request": ["self", "request"],
    f"{OPENAI}.serving_responses.OpenAIServingResponses.responses_full_generator": ["self", "request"],
    f"{OPENAI}.serving_responses.OpenAIServingResponses.__init__": ["self"],
    f"{OPENAI}.serving_responses.OpenAIServingResponses._response_input_history": ["self", "request"],
    "sglang.srt.observability.http_request_metrics._get_fastapi_request_path": ["request"],
    f"{MANAGERS}.tokenizer_manager._slice_streaming_output_meta_info": ["meta_info", "last_output_offset"],
    f"{MANAGERS}.tokenizer_manager.TokenizerManager.collect_metrics": ["self", "state"],
    "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector._log_gauge_queue_count": [
        "self", "gauge", "data",
    ],
    "sglang.srt.entrypoints.http_server.ORJSONRequest.json": ["self"],
    f"{OPENAI}.serving_tokenize.OpenAIServingTokenize._handle_non_streaming_request": [
        "self", "adapted_request", "request", "raw_request",
    ],
    "sglang.srt.function_call.function_call_parser.FunctionCallParser.__init__": ["self", "tools"],
    "sglang.srt.function_call.function_call_parser.FunctionCallParser.parse_non_stream": ["self"],
    "sglang.srt.function_call.function_call_parser.FunctionCallParser.parse_stream_chunk": [
        "self", "chunk_text",
    ],
    "sglang.srt.function_call.json_array_parser.JsonArrayParser.parse_streaming_increment": [
        "self", "new_text", "tools",
    ],
    "sglang.srt.parser.reasoning_parser.ReasoningParser.parse_stream_chunk": ["self", "chunk_text"],
    "sglang.srt.parser.reasoning_parser.ReasoningParser.parse_non_stream": ["self", "full_text"],
    "sglang.srt.parser.reasoning_parser.ReasoningParser.parse_non_stream_blocks": ["self", "full_text"],
    "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes": ["server_args", "port_args"],
    "sglang.srt.entrypoints.engine.Engine._launch_detokenizer_subprocesses": ["server_args", "port_args"],
    **{
        f"{MANAGERS}.tokenizer_manager.TokenizerManager.{path.removeprefix('/')}": ["self"]
        for path in sorted(REFUSED.keys() - ROUTES_ONLY)
    },
}  # fmt: skip
"""Leading parameters of every hooked function."""

ALWAYS = {
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    "sglang.srt.server_args.ServerArgs.from_cli_args",
    "uvicorn.server.Server.handle_exit",
    "torch.distributed.new_group",
    f"{MANAGERS}.utils.GenerationBatchResult.copy_to_cpu",
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
    "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add",
    "sglang.kernels.ops.activation.softcap.softcap_inplace_logits",
    f"{MANAGERS}.scheduler.get_exception_traceback",
    "sglang.srt.utils.common.kill_process_tree",
    "sglang.srt.layers.dual_gemm.DualGemm._select_mode",
    "sglang.srt.sampling.custom_logit_processor._cache_from_str",
    f"{MANAGERS}.schedule_batch.Req._check_str_based_finish",
    f"{MANAGERS}.schedule_batch.Req.update_finish_state",
    "sglang.srt.sampling.watermarking.core.redact_watermark_secrets",
    "sglang.srt.sampling.watermarking.core.redact_watermark_command_line",
    f"{MANAGERS}.tokenizer_manager.TokenizerManager._server_args_for_dump",
    "sglang.srt.utils.auth.decide_request_auth",
    "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
    "sglang.srt.entrypoints.engine.Engine._launch_detokenizer_subprocesses",
}
"""Those that act on every server (``patches.is_active``), or ask themselves."""

PARAMETERS = {
    "xgrammar.GrammarMatcher.traverse_draft_tree": {
        "retrieve_next_token", "retrieve_next_sibling", "draft_tokens", "token_bitmask",
    },
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": {
        "batch", "model_runner", "return_hidden_states_before_norm",
    },
    "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head": {"hidden_states", "lm_head"},
    "sglang.srt.layers.logits_processor.LogitsProcessor.forward": {"input_ids", "hidden_states", "lm_head"},
    "sglang.srt.layers.vocab_parallel_embedding.ParallelLMHead.__init__": {
        "num_embeddings", "embedding_dim", "params_dtype",
    },
    "sglang.srt.layers.vocab_parallel_embedding.VocabParallelEmbedding.weight_loader": {
        "param", "loaded_weight",
    },
    "sglang.srt.speculative.spec_utils.load_token_map": {"token_map_path"},
    "sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype": {
        "server_args_kv_cache_dtype", "model", "model_dtype", "is_draft_worker", "is_dflash",
        "speculative_draft_attention_backend", "speculative_draft_kv_cache_dtype",
    },
    "sglang.srt.layers.sampler.sampling_from_probs_torch": {"probs", "sampling_seed", "positions"},
    "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch": {
        "probs", "top_ks", "top_ps", "min_ps", "need_min_p_sampling", "sampling_seed", "positions",
    },
    "flashinfer.sampling.top_k_top_p_sampling_from_probs": {"probs", "top_k", "top_p", "filter_apply_order"},
    "flashinfer.sampling.min_p_sampling_from_probs": {"probs", "min_p"},
    "sglang.srt.layers.logprob_processor.compute_spec_logprobs": {
        "batch", "logits_output", "predict", "accept_index",
    },
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.move_kv_cache": {"tgt_loc", "src_loc"},
    "sglang.srt.managers.overlap_utils.FutureMap.__init__": {
        "device", "spec_algo", "req_to_token_pool", "needs_cpu_seq_lens", "needs_confidence_relay",
    },
    "sglang.srt.speculative.pp_draft_embedding.resolve_draft_embed_and_head": {
        "target_model", "draft_model", "model_path", "revision", "load_config",
    },
    "sglang.srt.utils.hf_transformers_utils.get_tokenizer": {
        "tokenizer_mode", "trust_remote_code", "tokenizer_backend",
    },
    "sglang.srt.managers.tp_worker.TpModelWorker.__init__": {
        "server_args", "gpu_id", "nccl_port", "is_draft_worker", "context_length",
    },
    "sglang.srt.speculative.base_spec_worker.BaseSpecWorker.note_request_finished": {"rid", "natural_stop"},
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.register": {
        "name", "supports_overlap", "spec_class",
    },
}  # fmt: skip
"""Parameters, by name, of what we call or override."""

FIELDS = {
    "sglang.srt.managers.utils.GenerationBatchResult": {
        "logits_output", "next_token_ids", "accept_lens", "cap_lens", "new_seq_lens", "next_draft_input",
        "speculative_num_draft_tokens", "speculative_output_stride", "can_run_cuda_graph",
    },
    "sglang.srt.managers.schedule_batch.ScheduleBatch": {
        "chunked_req", "req_pool_indices_cpu", "multimodal_inputs", "prefix_lens", "seq_lens_cpu",
    },
    "sglang.srt.managers.schedule_batch.MultimodalInputs": {"mm_items", "mrope_position_delta"},
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch": {
        "forward_mode", "batch_size", "input_ids", "req_pool_indices_cpu", "extend_prefix_lens_cpu",
        "extend_seq_lens_cpu", "extend_seq_lens", "extend_logprob_start_lens_cpu", "return_logprob",
        "input_embeds", "replace_embeds", "capture_hidden_mode", "mrope_positions",
    },
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo": {
        "temperatures", "top_ps", "top_ks", "min_ps", "is_all_greedy",
        "logit_bias", "vocab_size", "has_custom_logit_processor", "custom_logit_processor", "custom_params",
        "sampling_seed",
    },
}  # fmt: skip

MEMBERS = [
    "sglang.srt.utils.get_cpu_ids_by_node",
    "sglang.srt.utils.server_args_config_parser.ConfigArgumentMerger.merge_config_with_args",
    "sglang.srt.entrypoints.anthropic.serving.ERROR_TYPE_MAP",
    "sglang.srt.entrypoints.openai.serving_responses._MediaInputValidationError",
    *(
        f"sglang.srt.constrained.base_grammar_backend.BaseGrammarObject.{name}"
        for name in (
            "accept_token",
            "allocate_vocab_mask",
            "apply_vocab_mask",
            "fill_vocab_mask",
            "finished",
            "is_terminated",
            "move_vocab_mask",
            "rollback",
        )
    ),
    "sglang.srt.constrained.reasoner_grammar_backend.ReasonerGrammarObject._is_generation",
    "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar",
    "sglang.srt.managers.scheduler.Scheduler._advance_pending_grammar",
    "xgrammar.GrammarMatcher.stop_token_ids",
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
    "sglang.srt.managers.tp_worker.TpModelWorker._init_model_config",
    "sglang.srt.speculative.base_spec_worker.BaseSpecWorker.alloc_memory_pool",
    "sglang.srt.speculative.base_spec_worker.EagleDraftWorkerBase.draft_runners",
    "sglang.srt.speculative.base_spec_worker.EagleDraftWorkerBase.draft",
    "sglang.srt.speculative.base_spec_worker.EagleDraftWorkerBase.draft_extend",
    "sglang.srt.speculative.spec_info.SpecInputType.EAGLE_DRAFT",
    "sglang.srt.speculative.draft_parallel.resolve_draft_parallel_layout",
    "sglang.srt.configs.draft_parallel.DraftTPExecution.TARGET_LAYOUT",
    "sglang.srt.layers.moe.utils.draft_model_build_scope",
    "sglang.srt.speculative.spec_utils.draft_tp_context",
    "sglang.srt.speculative.spec_utils.draft_pp_context",
    "sglang.srt.models.llama.LlamaForCausalLM.set_eagle3_layers_to_capture",
    "sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3.set_embed",
    "sglang.srt.models.mimo_mtp.MiMoMTP.set_embed_and_head",
    "sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3.set_embed_and_head",
    "sglang.srt.model_executor.forward_context.get_attn_backend",
    "sglang.srt.model_executor.forward_context.get_token_to_kv_pool",
    "sglang.srt.layers.attention.attention_registry.register_attention_backend",
    "sglang.srt.arg_groups.choices.ATTENTION_BACKEND_CHOICES",
    "sglang.srt.arg_groups.choices.DRAFT_ATTENTION_BACKEND_CHOICES",
    "sglang.srt.runtime_context.get_schedule",
    "sglang.srt.runtime_context.get_serving",
    "sglang.srt.runtime_context.get_spec",
    "sglang.srt.session.session_controller.SessionReqNode.abort",
    "sglang.srt.platforms.device_mixin.PlatformEnum.OOT",
    "sglang.srt.managers.load_snapshot.snapshot_decoder",
    "sglang.srt.managers.load_snapshot.ShmLoadSnapshotReader.read_all",
    "sglang.srt.managers.load_snapshot.LoadSnapshot.to_dict",
    "sglang.srt.managers.scheduler_components.load_inquirer.SchedulerLoadInquirer.get_loads",
    "sglang.srt.managers.schedule_policy.CacheAgnosticPolicy.FCFS",
    "sglang.srt.managers.scheduler.Scheduler._reqs_finishing_inflight",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.new_tokens_required_next_decode",
    "sglang.srt.managers.mm_schedule.embedding_cache",
    "sglang.srt.managers.schedule_batch.MM_PAD_SHIFT_VALUE",
    "sglang.srt.managers.schedule_batch.MultimodalDataItem.hash",
    "sglang.srt.managers.schedule_batch.MultimodalDataItem.offsets",
    "sglang.srt.managers.schedule_batch.Req._check_token_based_finish",
    "sglang.srt.managers.schedule_batch.NextBatchPlan.batch_to_run",
    "sglang.srt.managers.schedule_batch.NextBatchPlan.running_batch",
    "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.evictable_size",
    "sglang.srt.mem_cache.multimodal_cache.MultiModalStaticCache.has",
    "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.available_size",
]


@pytest.fixture(autouse=True, scope="module")
def hooks() -> Iterator[list[tuple[str, Any, Any]]]:
    """What this version registers, without leaving it registered: target, function and kind of each hook."""
    from sglang.srt.plugins import hook_registry
    from sglang.srt.plugins.hook_registry import HookRegistry

    before, kept = list(patches.targets), HookRegistry.register
    propagate = hook_registry._propagate_patch
    registered: list[tuple[str, Any, Any]] = []
    HookRegistry.register = staticmethod(lambda *hook: registered.append(hook))
    try:
        patches.apply_all()
        yield registered
    finally:
        HookRegistry.register = kept
        hook_registry._propagate_patch = propagate
        patches.targets[:] = before


def parameters(path: str) -> list[str]:
    return list(inspect.signature(inspect.unwrap(pkgutil.resolve_name(path))).parameters)


def test_version() -> None:
    assert version("sglang") == SGLANG_VERSION
    assert f"sglang=={SGLANG_VERSION}" in requires("adaserve")


def test_every_module_that_hooks_is_applied() -> None:
    walked = pkgutil.walk_packages(patches.__path__, f"{patches.__name__}.")
    hooking = {m.name for m in walked if hasattr(import_module(m.name), "register")}
    applied = [f"{patches.__name__}.{at}.{name}" for at, names in patches.MODULES.items() for name in names]
    assert sorted(hooking) == sorted(applied)


def test_every_hook_has_its_contract(hooks: list[tuple[str, Any, Any]]) -> None:
    assert {target for target, *_ in hooks} <= set(TARGETS), "give each new hook its line in TARGETS"


def test_few_hooks_act_on_servers_of_other_algorithms(hooks: list[tuple[str, Any, Any]]) -> None:
    """A hook that asks whether it should act wraps its function."""
    assert {target for target, function, _ in hooks if not hasattr(function, "__wrapped__")} <= ALWAYS


@pytest.mark.parametrize("path", TARGETS)
def test_hooked_signature(path: str) -> None:
    assert parameters(path)[: len(TARGETS[path])] == TARGETS[path]


@pytest.mark.parametrize("path", PARAMETERS)
def test_called_signature(path: str) -> None:
    assert PARAMETERS[path] - set(parameters(path)) == set()


@pytest.mark.parametrize("path", FIELDS)
def test_fields(path: str) -> None:
    assert FIELDS[path] - set(pkgutil.resolve_name(path).__dataclass_fields__) == set()


@pytest.mark.parametrize("path", MEMBERS)
def test_member(path: str) -> None:
    pkgutil.resolve_name(path)


@pytest.mark.parametrize(("others", "warned"), [([], 0), (["plugin=other, dist=other"], 1)])
def test_a_warning_of_our_own_hooks_is_left_out(
    others: list[str], warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.plugins import hook_registry

    says = "Multiple AROUND hooks on '%s' (%d hooks, from: %s)."
    assert says.removesuffix(".") in inspect.getsource(hook_registry)
    sources = ["plugin=adaserve, dist=adaserve"] * 2 + others
    logger = logging.getLogger(hook_registry.__name__)
    logger.addFilter(patches.not_ours_alone)
    try:
        logger.warning(says, "a.b", len(sources), ", ".join(sources))
    finally:
        logger.removeFilter(patches.not_ours_alone)
    assert len(caplog.records) == warned


def test_a_prefill_batch_reads_its_chunk_size_anew() -> None:
    """patches/scheduler/prefill_slack.py changes it for one call; it reads the other attributes by name."""
    from sglang.srt.managers.scheduler import Scheduler

    source = inspect.getsource(Scheduler._get_new_batch_prefill_raw)
    for attribute in ("chunked_prefill_size", "max_prefill_tokens", "chunked_req", "truncation_align_size"):
        assert f"self.{attribute}" in source, f"Scheduler.{attribute} moved: prefills would not be paced"
    assert "for req in self.waiting_queue" in source, "the queue is no longer served in its order"
    limit = "adder.chunked_req_limit = self.policy.shortest_prefill_chunk_limit("
    assert limit in source, "nobody could pass a started prompt"
    assert "has_chunked_req=(self.chunked_req is not None)" in source, "two prompts could be started"
    assert "chunked_req=self.chunked_req,\n" in source, "the worker took parts of prompts for whole ones"


def test_what_a_worker_says_about_itself_keeps_its_order() -> None:
    """patches/start/kv_reserve.py changes two of the values."""
    from sglang.srt.managers.tp_worker import TpModelWorker

    from adaserve.patches.start.kv_reserve import LONGEST_PROMPT, LONGEST_REQUEST

    said = inspect.getsource(TpModelWorker.get_worker_info).split("return (")[1].split(",")
    assert said[LONGEST_REQUEST].strip() == "max_req_len"
    assert said[LONGEST_PROMPT].strip() == "max_req_input_len"


def test_a_result_is_copied_under_a_name() -> None:
    """patches/start/cpu_kernels.py takes the name off, which is a decorator's."""
    from sglang.srt.managers.utils import GenerationBatchResult

    plain = inspect.unwrap(GenerationBatchResult.copy_to_cpu)
    assert plain is not GenerationBatchResult.copy_to_cpu
    assert "return_logprob" in inspect.signature(plain).parameters


def test_a_server_with_several_workers_hears_of_a_death_by_a_signal() -> None:
    """patches/start/worker_supervisor.py gives uvicorn's supervisor what to do then."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from uvicorn.supervisors.multiprocess import Multiprocess

    assert "parent_process.send_signal(signal.SIGQUIT)" in inspect.getsource(run_scheduler_process)
    assert 'getattr(self, f"handle_{sig_name.lower()}", None)' in inspect.getsource(
        Multiprocess.handle_signals
    )


def test_what_sglang_asks_its_own_server_when_it_starts() -> None:
    """patches/http/slo_requests.py knows by that what nobody has asked for."""
    from sglang.srt.entrypoints.http_server import _execute_server_warmup

    from adaserve.slo.resolve import START_PARAMS, START_TEXT

    source = " ".join(inspect.getsource(inspect.unwrap(_execute_server_warmup)).split())
    assert f'json_data["text"] = [ "{START_TEXT}" ] * get_parallel().num_dp_ranks' in source
    assert f"max_new_tokens = {START_PARAMS['max_new_tokens']} if" in source
    assert '"sampling_params": { "temperature": 0, "max_new_tokens": max_new_tokens, }' in source


def test_what_sglang_says_of_a_late_grammar() -> None:
    """``grammar_memory`` knows it by that, and counts the grammars that SGLang keeps by place."""
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
    from sglang.srt.constrained.grammar_manager import GrammarManager

    from adaserve.patches.scheduler.grammar_memory import LATE

    source = inspect.getsource(inspect.unwrap(GrammarManager.get_ready_grammar_requests))
    assert f'InvalidGrammarObject("{LATE}")' in source
    assert "self.cache[key] = value" in inspect.getsource(inspect.unwrap(BaseGrammarBackend.set_cache))


def test_looks_for_grammars_are_counted_and_last_as_they_did() -> None:
    """patches/scheduler/grammar_polls.py makes them shorter and counts fewer."""
    from sglang.srt.constrained.grammar_manager import GrammarManager

    source = inspect.getsource(inspect.unwrap(GrammarManager.get_ready_grammar_requests))
    assert source.count("grammar_wait_ct += 1") == 1
    assert "< self.SGLANG_GRAMMAR_POLL_INTERVAL:" in source
    assert "time.sleep(self.SGLANG_GRAMMAR_POLL_INTERVAL / 10)" in source


def test_of_several_outputs_the_last_one_is_sent() -> None:
    """patches/http/slow_readers.py drops the others."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    source = inspect.getsource(TokenizerManager._stream_one_response)
    assert "out = out_list[-1]" in source
    assert "incremental_stream = is_stream and self.incremental_streaming_output" in source


def test_what_load_snapshots_are_made_and_read_with() -> None:
    """patches/scheduler/load_reports.py puts a section of ours between."""
    from sglang.srt.managers import load_snapshot
    from sglang.srt.managers.scheduler import Scheduler

    assert "self.load_inquirer.get_loads()" in inspect.getsource(Scheduler.publish_load_snapshot)
    assert "snapshot_decoder.decode" in inspect.getsource(load_snapshot.ShmLoadSnapshotReader._read_slot)


def test_the_reason_of_an_abort_reaches_the_http_process() -> None:
    """patches/scheduler/shedding.py puts fields of ours into it."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    assert "finished_reason=recv_req.finished_reason" in inspect.getsource(Scheduler.abort_request)
    assert "finish_reason = recv_obj.finished_reason" in inspect.getsource(TokenizerManager._handle_abort_req)


def test_prefills_ask_whoever_has_graphs() -> None:
    """``engine/gpu/prompts.py`` stands there, and gives the logits of every prompt's last token."""
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    source = inspect.getsource(ModelRunner._forward_raw)
    assert "and self.prefill_cuda_graph_runner.can_run_graph(forward_batch)" in source
    assert "ret = self.prefill_cuda_graph_runner.execute(" in source
    assert "batch.forward_mode.is_extend_without_speculative()" in inspect.getsource(ForwardBatch.init_new)
    last = "last_index = torch.cumsum(logits_metadata.extend_seq_lens, dim=0) - 1"
    assert last in inspect.getsource(LogitsProcessor._get_pruned_states)


def test_the_worker_is_given_the_barrier_of_the_grammars() -> None:
    """Under overlap matchers lag behind; SGLang must let the worker advance them, and once only."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor,
    )

    assert '"grammar_barrier"' in inspect.getsource(Scheduler.run_batch)
    source = inspect.getsource(SchedulerBatchResultProcessor.advance_grammar_fsm)
    assert "if result.grammar_advanced" in source and "result.grammar_advanced = True" in source


def methods(owner: type) -> dict[str, Any]:
    found = inspect.getmembers(owner, inspect.isfunction)
    return {name: function for name, function in found if not name.startswith("_")}


def in_tree() -> dict[str, Any]:
    """What the scheduler may call on any algorithm: the public methods of SGLang's own enum."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    # Members of an enum hide its methods from inspect.getmembers.
    own = {
        n: f for n, f in vars(SpeculativeAlgorithm).items() if inspect.isfunction(f) and not n.startswith("_")
    }
    assert own, "SpeculativeAlgorithm has no methods any more"
    return own


@pytest.mark.parametrize("name", sorted(in_tree()))
def test_algorithm_answers_what_the_in_tree_ones_do(name: str) -> None:
    ours = getattr(AdaServeAlgorithm, name, None)
    assert ours is not None, f"SGLang's algorithms have {name}: define it on AdaServeAlgorithm"
    theirs = inspect.signature(in_tree()[name]).parameters
    accepted = inspect.signature(ours).parameters
    if any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        return
    assert set(theirs) <= set(accepted), f"{name} is called with {set(theirs) - set(accepted)}"


def test_worker_overrides_exist_above() -> None:
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

    from adaserve.engine.worker import AdaServeWorker

    called_by_sglang = {"alloc_memory_pool", "note_request_finished"}
    assert called_by_sglang <= set(methods(BaseSpecWorker)) & set(methods(AdaServeWorker))


def test_draft_model_leaves_nothing_abstract() -> None:
    from adaserve.engine.sources.draft_model import DraftModel

    assert not getattr(DraftModel, "__abstractmethods__", frozenset())


@pytest.mark.parametrize("group", ["sglang.srt.plugins", "sglang.srt.platforms"])
def test_entry_points_load(group: str) -> None:
    ours = [e for e in entry_points(group=group) if e.value.startswith("adaserve.")]
    assert len(ours) == 1, f"found {ours}: install the project (pip install -e .)"
    assert callable(ours[0].load())


def test_a_moved_target_is_refused_by_name() -> None:
    from sglang.srt.plugins.hook_registry import HookType

    with pytest.raises(patches.PatchError, match=r"ServerArgs\.gone.*pip install sglang"):
        patches.hook("sglang.srt.server_args.ServerArgs.gone", lambda: None, HookType.AFTER)


def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it has moved: a hook may fit and mean something else."""
    monkeypatch.setattr(sglang_compat, "version", lambda _: "0.5.24")
    with pytest.raises(patches.PatchError, match=r"sglang 0\.5\.24.*pip install sglang==0\.5\.23"):
        patches.apply_all()


def test_a_hook_that_was_not_applied_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs it and goes on."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_patched", {"sglang.done"})
    monkeypatch.setattr(patches, "targets", ["sglang.done"])
    patches.require_applied()
    monkeypatch.setattr(patches, "targets", ["sglang.done", "sglang.lost"])
    with pytest.raises(patches.PatchError, match=r"did not apply the hooks of sglang\.lost\."):
        patches.require_applied()


def test_a_route_that_is_gone_is_named() -> None:
    from fastapi import FastAPI

    with pytest.raises(patches.PatchError, match="no route /abort_request"):
        patches.wrap_routes(FastAPI(), ("/abort_request",), lambda app: app)


def test_name_is_free() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    assert NAME not in SpeculativeAlgorithm.__members__


@pytest.mark.parametrize(("nodes", "arrival_s"), [(1, 12.5), (2, 3612.5)])
def test_the_time_of_arrival_travels_to_the_scheduler(
    monkeypatch: pytest.MonkeyPatch, nodes: int, arrival_s: float
) -> None:
    """Also where somebody has set the clock back since, as the scheduler noticed with the last request."""
    from sglang.srt import runtime_context
    from sglang.srt.observability import req_time_stats as times

    from adaserve.patches.http.arrival_times import _with_arrival, as_it_is

    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(nnodes=nodes))
    convert = functools.partial(as_it_is, times.convert_time_cross_thread)
    monkeypatch.setattr(times, "convert_time_cross_thread", convert)
    sent, received = times.APIServerReqTimeStats(), times.APIServerReqTimeStats()
    sent.set_created_time(12.5)
    state = _with_arrival(sent.__getstate__(), sent)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600.0)
    monkeypatch.setattr(times, "global_diff_realtime_monotonic", times.global_diff_realtime_monotonic)
    times.calibrate_time_diff()
    received.__setstate__(state)
    created_s = times.SchedulerReqTimeStats.new_from_obj(received).created_time
    assert created_s == pytest.approx(arrival_s, abs=0.1)


@pytest.mark.skipif(select() is None, reason="another platform serves on this host")
def test_the_device_that_is_found_is_a_name() -> None:
    """Where no --device is given, as in `sgl.Engine`, SGLang splits it."""
    from sglang.srt.utils import get_device

    assert get_device() == "cpu"


def test_results_are_copied_behind_what_a_stream_has_recorded() -> None:
    """patches/scheduler/result_copies.py has another event stand there, and for nothing else."""
    import torch
    from sglang.srt.managers.scheduler import Scheduler

    source = inspect.getsource(inspect.unwrap(Scheduler._copy_result_to_cpu))
    assert source.count("self.copy_stream.wait_stream(self.forward_stream)") == 1
    assert source.count("self.forward_stream") == 1
    assert "self.wait_event(stream.record_event())" in inspect.getsource(torch.cuda.Stream.wait_stream)


def test_who_reads_results_that_wait_is_known() -> None:
    """patches/scheduler/mixed_forwards.py adds a second result to one of them, and to nobody else's view."""
    from sglang.srt.managers.scheduler import Scheduler

    hooked = {"_reqs_finishing_inflight", "_advance_pending_grammar"}
    counted = {"is_disable_overlap_for_batch", "is_fully_idle"}  # whether there is any
    processed = {"event_loop_overlap", "pause_generation"}
    by_request = {"_collect_inflight_batches"}  # which are in the running batch, too
    functions = inspect.getmembers(Scheduler, inspect.isfunction)
    sources = {name: inspect.getsource(inspect.unwrap(function)) for name, function in functions}
    readers = {name for name, source in sources.items() if "self.result_queue" in source}
    others = {name for name in readers if name.startswith("init_") or "disagg" in name}
    assert readers - others == hooked | counted | processed | by_request
