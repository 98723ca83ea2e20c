//! Sparse attention over lists of tokens: every query token is a request whose row of a block table, in pages of one
//! token, lists the records that it sees. The lists change from run to run, as those of layers do.

use super::compare::compare;
use super::door::Session;
use super::instance::Scratch;
use super::memory::{HostMemory, Image, Memory, Resident};
use super::mla::{MlaLayer, MlaProblem, attention_over};
use super::pages::PageTable;
use super::problem::TableForm;
use super::values::shuffled;
use folio::api::{BatchInput, Stream};

/// Where a run finds the lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lists {
    /// On the host, from where every plan copies them.
    Planned,
    /// On the device, where runs of one plan read what is there.
    Read,
}

/// Runs two layers with lists of up to `longest` tokens for each of `tokens` queries, over `keys` records that all lists
/// share. `stored` says how these are stored.
pub fn check_lists(
    session: &dyn Session,
    memory: &dyn Memory,
    lists: Lists,
    (tokens, keys, longest): (u32, u32, u32),
    stored: &dyn Fn(MlaProblem) -> MlaProblem,
) {
    let form = TableForm::BlockTable { spare_columns: 0 };
    let in_slots = |lens: &[(u32, u32)]| stored(MlaProblem::plain(lens).pages(1, form));
    // The queries and the records; who sees what is said by lists.
    let all = in_slots(&[(tokens, keys)]);
    let slots = &PageTable::of(&all.batch).ids[0];
    // The first tokens see few records, the first of all none.
    let listed: Vec<i32> = (0..tokens).map(|t| (7 * t).min(longest) as i32).collect();
    let desc = in_slots(&vec![(1, longest); tokens as usize]).desc();
    let mut handle = session.attention(desc).unwrap();
    let scratch = Scratch::new(memory, &handle.workspace().unwrap());
    let layer = MlaLayer::new(memory, &all);
    let kv_len = Resident::new(&HostMemory, Image::of_i32(&[tokens.into()], &listed));
    let shape = [i64::from(tokens), i64::from(longest) + 2];
    let table = |of_layer: u64| {
        let mut seen: Vec<Vec<usize>> = Vec::new();
        let mut entries = Vec::new();
        for (t, &count) in listed.iter().enumerate() {
            let drawn = shuffled(of_layer * 1000 + t as u64, keys as usize);
            let list: Vec<usize> = drawn
                .iter()
                .take(count as usize)
                .map(|&j| j as usize)
                .collect();
            entries.extend(list.iter().map(|&j| slots[j]));
            // As indexers fill up their lists.
            entries.resize(shape[1] as usize * (t + 1), -1);
            seen.push(list);
        }
        (seen, Image::of_i32(&shape, &entries))
    };
    let index_memory = match lists {
        Lists::Planned => &HostMemory,
        Lists::Read => memory,
    };
    let block_table = Resident::new(index_memory, table(0).1);
    let batch = BatchInput {
        kv_len: Some(kv_len.tensor()),
        block_table: Some(block_table.tensor()),
        ..BatchInput::default()
    };
    for of_layer in 0..2 {
        let (seen, entries) = table(of_layer);
        block_table.copy_from(&Resident::new(index_memory, entries));
        if of_layer == 0 || lists == Lists::Planned {
            scratch.plan(&mut *handle, &batch).unwrap();
        }
        layer.reset_outputs();
        handle.run(&layer.input(), Stream::default()).unwrap();
        scratch.assert_within_bounds();
        let want = attention_over(&all, |_, i| seen[i].clone());
        let result = compare(&all.batch, &want, &layer.output(), all.tolerance());
        assert_eq!(result, Ok(()), "layer {of_layer} of {lists:?}, {all:?}");
    }
}
