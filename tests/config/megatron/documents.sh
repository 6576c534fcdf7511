#!/bin/bash
# Documents kept apart, heads normalised, linear layers without biases, two corpora that are split and blended
DATA=/data
MODEL_ARGS=(
    --num-layers 6
    --hidden-size 384
    --num-attention-heads 6
    --seq-length 1024
    --max-position-embeddings 1024
    --qk-layernorm
    --disable-bias-linear
    --attention-dropout 0.0
    --hidden-dropout 0.0
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 96
    --train-iters 6000
    --lr 8.0e-4
    --min-lr 1.0e-5
    --lr-warmup-iters 60
    --lr-warmup-init 1.0e-7
    --lr-decay-style WSD
    --lr-wsd-decay-iters 600
    --weight-decay 0.1
    --bf16
)
DATA_ARGS=(
    --data-path 0.3 ${DATA}/web_text_document 0.7 ${DATA}/books_text_document
    --split 949,50,1
    --reset-position-ids
    --reset-attention-mask
    --eod-mask-loss
    --tokenizer-type GPT2BPETokenizer
    --eval-interval 500
    --eval-iters 10
)
torchrun pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} ${DATA_ARGS[@]}
