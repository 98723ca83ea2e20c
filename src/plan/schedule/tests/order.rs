//! The order of the items.

use super::*;

fn order(lens: &[(i32, i32)], kind: Kind) -> Vec<(u32, u32)> {
    tiles_of(&cut_as(lens, &PLAIN, false, kind))
}

/// The requests of the items, and their first rows.
fn tiles_of(work: &WorkList) -> Vec<(u32, u32)> {
    work.items.iter().map(|i| (i.request, i.q_start)).collect()
}

proptest! {
    #[test]
    fn decode_goes_by_cost(kv in prop::collection::vec(0i32..100_000, 1..400)) {
        let lens: Vec<_> = kv.iter().map(|&kv| (1, kv)).collect();
        let order = order(&lens, Kind::Decode);
        let most = kv.iter().max().unwrap();
        for pair in order.windows(2) {
            let [first, second] = [pair[0].0, pair[1].0].map(|b| kv[b as usize]);
            prop_assert!(first + most / 64 >= second, "{first} before {second}");
        }
        let mut requests: Vec<u32> = order.iter().map(|&(request, _)| request).collect();
        requests.sort_unstable();
        prop_assert!(requests.into_iter().eq(0..kv.len() as u32));
    }
}

#[test]
fn the_largest_item_of_decode_comes_first() {
    let lens = [(1, 10), (64, 640), (1, 700)];
    assert_eq!(order(&lens, Kind::Decode), [(1, 0), (2, 0), (0, 0)]);
}

#[test]
fn prefill_keeps_requests_together() {
    let lens = [(128, 640), (128, 640), (1, 700)];
    assert_eq!(
        order(&lens, Kind::Prefill),
        [(2, 0), (0, 64), (0, 0), (1, 64), (1, 0)]
    );
}

/// Few rounds for so many workers.
const MANY_WORKERS: Tiling = Tiling {
    workers: Workers {
        all: 100,
        of_item: 8,
        small: SmallItems::NONE,
    },
    ..PLAIN
};

#[test]
fn few_tiles_of_prefill_go_by_length() {
    let lens = [(128, 640), (128, 640), (1, 700)];
    assert_eq!(
        tiles_of(&cut(&lens, &MANY_WORKERS, false)),
        [(2, 0), (0, 64), (1, 64), (0, 0), (1, 0)]
    );
}

/// 64 tiles are five rounds and more: too many where all have as many keys, and few where one has more.
#[test]
fn lengths_that_are_far_apart_are_few_rounds_longer() {
    let mut lens = vec![(128, 640); 32];
    let requests = |lens: &[(i32, i32)]| -> Vec<u32> {
        let order = tiles_of(&cut(lens, &MANY_WORKERS, false));
        order.into_iter().take(4).map(|(b, _)| b).collect()
    };
    assert_eq!(requests(&lens), [0, 0, 1, 1]);
    lens[31] = (128, 1500);
    assert_eq!(requests(&lens), [31, 31, 0, 1]);
}
