"""The operations of the model: one file per op with its contract, in torch; `*_decode`, `*_prefill`: Triton kernels.

Dimension alphabet, used in every signature and shape tag:

| letter | meaning |
|---|---|
| `T` | rows in one call: tokens of a prefill chunk, or `B * R` |
| `B`, `R` | sequences in a call; rows per sequence (anchor and drafts) |
| `E` | hidden width of the residual stream |
| `N` | outputs of a product; stored padded with zero rows to a multiple of 32 |
| `H`, `K`, `D` | query heads, KV heads, attention head size |
| `G`, `V`, `d` | GDN key heads, GDN value heads, GDN head size |
| `C` | convolution channels, `2 * G * d + V * d` |
| `X`, `A`, `I` | experts, active experts per token, width of one MLP |
| `P`, `Z` | KV pages of one sequence; tokens in a page (64) |
| `L` | tokens a row attends to, itself included |

A *row call* holds the anchor and draft rows of running sequences: the result of a row there does not depend on the
other rows, their number or its place among them, bit for bit. A *chunk call* (`chunk=True`) holds rows of one prompt
and may use routes tuned for many rows: same law, other last bits.
"""
