"""What SGLang's speculation calls on a CPU, in plain torch: a draft's place in its tree, slots of
drafts, which drafts the target's greedy tokens accept, and rows that move to other slots.
"""

import ctypes

import torch


def reconstruct_indices_from_tree_mask(
    tree_mask, lengths, positions, indices, next_token, next_sibling, batch, drafts
):
    """From drafts x drafts cells, whether one attends to the other: each draft's position, index,
    first child and next sibling, -1 for none.
    """
    indices.copy_(torch.arange(batch * drafts).view(batch, drafts))
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    above = tree_mask.view(batch, drafts, drafts).bool().tril(-1)
    positions.copy_((above.sum(-1) + lengths.view(-1, 1)).flatten())
    for b in range(batch):
        last = {}  # child so far, by parent
        for i in range(1, drafts):
            ancestors = above[b, i].nonzero().flatten().tolist()
            if not ancestors:
                continue
            parent = ancestors[-1]
            if parent in last:
                next_sibling[b, last[parent]] = i
            else:
                next_token[b, parent] = i
            last[parent] = i


def assign_extend_cache_locs_cpu(requests, req_to_token, start, end, slots, width):
    """The slots of each request's tokens from start to end, one request after another."""
    ranges = zip(requests.tolist(), start.tolist(), end.tolist())
    found = torch.cat([req_to_token[row, first:last] for row, first, last in ranges])
    slots[: len(found)] = found


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Follows in each tree the drafts that the target would have chosen."""
    chosen = target_predict.flatten()
    for b in range(len(candidates)):
        node = accepted = 0
        accept_index[b, 0] = retrive_index[b, 0]
        while accepted + 1 < accept_index.shape[1]:
            here = retrive_index[b, node]
            child = int(retrive_next_token[b, node])
            while child >= 0 and candidates[b, child] != chosen[here]:
                child = int(retrive_next_sibling[b, child])
            if child < 0:
                break
            predicts[here] = chosen[here]
            node, accepted = child, accepted + 1
            accept_index[b, accepted] = retrive_index[b, node]
        accept_token_num[b] = accepted
        predicts[retrive_index[b, node]] = chosen[retrive_index[b, node]]


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, stride):
    """The last accepted token of each request."""
    rows = torch.arange(len(accept_lens)) * stride
    bonus_tokens.copy_(accept_tokens.flatten()[rows + accept_lens - 1])


def fill_accept_out_cache_loc_cpu(accept_index, slots, accepted_slots):
    """The slots of accepted drafts, next to each other."""
    kept = accept_index[accept_index >= 0]
    accepted_slots[: len(kept)] = slots[kept]


def copy_all_layer_kv_cache_cpu(addresses, row_bytes, to_slots, from_slots):
    """Moves rows of every buffer: all are read before one is written."""
    for address, size in zip(addresses.tolist(), row_bytes.tolist()):
        rows = [ctypes.string_at(address + size * slot, size) for slot in from_slots.tolist()]
        for slot, row in zip(to_slots.tolist(), rows):
            ctypes.memmove(address + size * slot, row, size)


def assign_req_to_token_pool_cpu(requests, req_to_token, start, end, slots, width):
    """Enters new slots in each request's row, from start to end."""
    counts = (end - start).tolist()
    rows = zip(requests.tolist(), start.tolist(), end.tolist(), slots[: sum(counts)].split(counts))
    for row, first, last, new in rows:
        req_to_token[row, first:last] = new.to(req_to_token.dtype)
