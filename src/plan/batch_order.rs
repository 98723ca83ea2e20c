//! The order that vLLM's backends want a batch in, decodes first, and the swaps that make it. There are two such orders:
//! that of the first releases knows decodes and prefills, the later one also prefills whose context was computed before.

/// A batch in its new order.
#[derive(Debug, PartialEq, Eq)]
pub struct BatchOrder {
    /// Where each place's request stood before.
    pub order: Vec<i32>,
    /// Places to be swapped, one pair after the other.
    pub swaps: Vec<[i32; 2]>,
}

impl BatchOrder {
    fn of(requests: usize) -> BatchOrder {
        BatchOrder {
            order: (0..requests as i32).collect(),
            swaps: Vec::new(),
        }
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.order.swap(a, b);
        self.swaps.push([a as i32, b as i32]);
    }
}

/// The older order: a decode has up to `threshold` rows. The last decodes change places with the first prefills until
/// decodes come first.
pub fn decodes_first(query_lens: &[i32], threshold: i64) -> BatchOrder {
    let is_decode = |b: &usize| i64::from(query_lens[*b]) <= threshold;
    let (decodes, prefills): (Vec<usize>, Vec<usize>) = (0..query_lens.len()).partition(is_decode);
    let mut batch = BatchOrder::of(query_lens.len());
    for (&prefill, &decode) in prefills.iter().zip(decodes.iter().rev()) {
        if decode < decodes.len() {
            break;
        }
        batch.swap(prefill, decode);
    }
    batch
}

/// Where a request belongs in the later order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Region {
    Decode,
    Extend,
    Prefill,
}

/// The later order: decodes (up to `threshold` rows and a context), then other requests with a context, then those without.
/// Only requests that stand in the wrong region move. Those of a region fill its places from the front, each in turn.
pub fn decodes_extends_prefills(
    query_lens: &[i32],
    context_lens: &[i32],
    threshold: i64,
) -> BatchOrder {
    let requests = query_lens.len();
    let region = |b: usize| match (context_lens[b], i64::from(query_lens[b])) {
        (0, _) => Region::Prefill,
        (_, rows) if rows <= threshold => Region::Decode,
        _ => Region::Extend,
    };
    let mut wanted: Vec<Region> = (0..requests).map(region).collect();
    wanted.sort_unstable();
    let places: Vec<usize> = (0..requests).filter(|&b| region(b) != wanted[b]).collect();
    let mut sources = places.clone();
    // Stable: those of a region keep their order.
    sources.sort_by_key(|&b| region(b));
    let mut target: Vec<usize> = (0..requests).collect();
    for (&source, &place) in sources.iter().zip(&places) {
        target[source] = place;
    }
    let mut batch = BatchOrder::of(requests);
    // A cycle: who is sent to a place sends on who stood there.
    for source in sources {
        while target[source] != source {
            let place = target[source];
            batch.swap(source, place);
            target[source] = target[place];
            target[place] = place;
        }
    }
    batch
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What the swaps make of a batch in its own order.
    fn swapped(requests: usize, swaps: &[[i32; 2]]) -> Vec<i32> {
        let mut order: Vec<i32> = (0..requests as i32).collect();
        for &[a, b] in swaps {
            order.swap(a as usize, b as usize);
        }
        order
    }

    #[test]
    fn the_older_order() {
        let order = |lens: &[i32]| decodes_first(lens, 1);
        assert_eq!(order(&[100, 1, 200, 1]).order, [3, 1, 2, 0]);
        let crossed = order(&[100, 200, 1, 1]);
        assert_eq!(crossed.order, [3, 2, 1, 0]);
        assert_eq!(crossed.swaps, [[0, 3], [1, 2]]);
        assert!(order(&[1, 1, 5]).swaps.is_empty());
    }

    #[test]
    fn the_later_order() {
        let order = |requests: &[(i32, i32)], threshold| {
            let (lens, contexts): (Vec<i32>, Vec<i32>) = requests.iter().copied().unzip();
            decodes_extends_prefills(&lens, &contexts, threshold).order
        };
        assert_eq!(order(&[(100, 0), (10, 50), (1, 10)], 1), [2, 1, 0]);
        let many = [
            (1, 20),
            (1, 50),
            (374, 0),
            (300, 20),
            (1, 20),
            (256, 0),
            (1, 5),
            (27, 0),
            (1, 4),
        ];
        assert_eq!(order(&many, 1), [0, 1, 6, 8, 4, 3, 2, 7, 5]);
        assert_eq!(
            order(&[(2, 10), (3, 20), (5, 30), (6, 40)], 4),
            [0, 1, 2, 3]
        );
    }

    proptest! {
        #[test]
        fn both_sort_and_say_how(
            requests in prop::collection::vec((0i32..5, 0i32..3), 0..20),
            threshold in 0i64..4,
        ) {
            let (lens, contexts): (Vec<i32>, Vec<i32>) = requests.iter().copied().unzip();
            let older = decodes_first(&lens, threshold);
            prop_assert_eq!(&swapped(lens.len(), &older.swaps), &older.order);
            let is_prefill = |b: &i32| i64::from(lens[*b as usize]) > threshold;
            prop_assert!(older.order.iter().map(is_prefill).is_sorted());
            let later = decodes_extends_prefills(&lens, &contexts, threshold);
            prop_assert_eq!(&swapped(lens.len(), &later.swaps), &later.order);
            let region = |b: &i32| match requests[*b as usize] {
                (_, 0) => 2,
                (rows, _) => i32::from(i64::from(rows) > threshold),
            };
            prop_assert!(later.order.iter().map(region).is_sorted());
            prop_assert!(later.swaps.len() < lens.len().max(1));
        }
    }
}
