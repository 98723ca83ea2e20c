//! Projections of MLA as plain data: their tensors in some memory, and the formula in float64.

use super::codec::{encode, rounded};
use super::door::Session;
use super::instance::for_each_index;
use super::memory::{Image, Memory, Resident, View};
use super::values::{mix, normal};
use folio::api::Stream;
use folio::dtype::DType;
use folio::problem::{AbsorbQArgs, ProjectOArgs, UpProjectArgs};
use folio::tensor::Tensor;

/// Error of a sum in fp32, per unit of `Σ |x w|`: a matrix unit rounds towards zero at every step, of which there
/// are 64 in the longest sums here.
const SUM_ERROR: f64 = 9.5e-7; // 2^-20

/// Which products.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Operator {
    AbsorbQ,
    ProjectO,
    /// Both keys and values.
    UpProject,
}

/// How rows lie in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Layout {
    Compact,
    /// All tokens of a head follow one another.
    HeadMajor,
    /// As many elements after each row.
    Gapped(i64),
}

/// How weights lie in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Weights {
    Compact,
    /// Parts of `kv_b_proj`, as a model has it.
    Parts,
    /// Two elements apart, rows in no order of theirs.
    Scattered,
}

/// One call.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub operator: Operator,
    pub dtype: DType,
    pub tokens: i64,
    pub heads: i64,
    /// P, V and L.
    pub widths: [i64; 3],
    pub layout: Layout,
    pub weights: Weights,
}

/// Numbers of one tensor, which depend on the index alone.
#[derive(Clone, Copy)]
pub struct Values {
    pub dtype: DType,
    pub seed: u64,
}

impl Values {
    pub fn at(&self, index: &[i64]) -> f64 {
        let hash = index
            .iter()
            .fold(mix(self.seed), |hash, &i| mix(hash ^ i as u64));
        rounded(self.dtype, normal(hash))
    }

    /// A tensor of them; what lies between its elements is poison.
    pub fn image(&self, view: View) -> Image {
        let shape = view.shape.clone();
        let mut image = Image::poisoned(view);
        for_each_index(&shape, |index| {
            image.put(index, encode(self.dtype, self.at(index)));
        });
        image
    }
}

/// `[tokens, heads, width]` in a layout.
pub fn rows(dtype: DType, shape: [i64; 3], layout: Layout) -> View {
    let [tokens, heads, width] = shape;
    let strides = match layout {
        Layout::Compact => [heads * width, width, 1],
        Layout::HeadMajor => [width, tokens * width, 1],
        Layout::Gapped(gap) => [heads * (width + gap) + gap, width + gap, 1],
    };
    View {
        dtype,
        shape: shape.to_vec(),
        strides: strides.to_vec(),
        lead: match layout {
            Layout::Gapped(gap) => gap as usize,
            _ => 0,
        },
    }
}

/// W_UK and W_UV in some memory, and what is in them.
pub struct Model<'m> {
    memory: Vec<Resident<'m>>,
    pub w_uk: Tensor,
    pub w_uv: Tensor,
    pub values: Values,
    widths: [i64; 3],
}

impl<'m> Model<'m> {
    pub fn new(memory: &'m dyn Memory, case: &Case) -> Model<'m> {
        let Case { dtype, heads, .. } = *case;
        let [nope, value, latent] = case.widths;
        let values = Values { dtype, seed: 5 };
        let per_head = nope + value;
        let kv_b_proj = values.image(View::compact(dtype, &[heads * per_head, latent]));
        let copy = |shape: [i64; 3], from: &dyn Fn(&[i64]) -> [i64; 2]| {
            let scattered = View {
                dtype,
                shape: shape.to_vec(),
                strides: vec![2 * shape[2] * shape[1] + 6, 2, 2 * shape[1]],
                lead: 1,
            };
            let mut image = Image::poisoned(match case.weights {
                Weights::Scattered => scattered,
                _ => View::compact(dtype, &shape),
            });
            for_each_index(&shape, |at| image.put(at, kv_b_proj.bits(&from(at))));
            Resident::new(memory, image)
        };
        if case.weights == Weights::Parts {
            let whole = Resident::new(memory, kv_b_proj);
            let of_heads = whole.tensor().split_dim(0, per_head);
            return Model {
                w_uk: of_heads.narrow(1, 0, nope),
                w_uv: of_heads.narrow(1, nope, value).swap_dims(1, 2),
                memory: vec![whole],
                values,
                widths: case.widths,
            };
        }
        let w_uk = copy([heads, nope, latent], &|at| {
            [at[0] * per_head + at[1], at[2]]
        });
        let w_uv = copy([heads, latent, value], &|at| {
            [at[0] * per_head + nope + at[2], at[1]]
        });
        Model {
            w_uk: w_uk.tensor(),
            w_uv: w_uv.tensor(),
            memory: vec![w_uk, w_uv],
            values,
            widths: case.widths,
        }
    }

    pub fn w_uk(&self, head: i64, p: i64, l: i64) -> f64 {
        let per_head = self.widths[0] + self.widths[1];
        self.values.at(&[head * per_head + p, l])
    }

    pub fn w_uv(&self, head: i64, l: i64, v: i64) -> f64 {
        let per_head = self.widths[0] + self.widths[1];
        self.values.at(&[head * per_head + self.widths[0] + v, l])
    }

    fn is_untouched(&self) -> bool {
        self.memory.iter().all(Resident::is_untouched)
    }
}

/// A product of the formula: rows of `x`, and a weight of every head.
struct Product<'a> {
    x: &'a dyn Fn(i64, i64, i64) -> f64,
    weight: &'a dyn Fn(i64, i64, i64) -> f64,
    depth: i64,
}

impl Case {
    /// Calls the operator and compares with the formula.
    pub fn check(&self, session: &dyn Session, memory: &dyn Memory) {
        let model = Model::new(memory, self);
        let [nope, value, latent] = self.widths;
        let x = Values {
            dtype: self.dtype,
            seed: 6,
        };
        let of_heads = |width| {
            let view = rows(self.dtype, [self.tokens, self.heads, width], self.layout);
            Resident::new(memory, x.image(view))
        };
        let output = |width| {
            let view = rows(self.dtype, [self.tokens, self.heads, width], self.layout);
            Resident::new(memory, Image::poisoned(view))
        };
        let stream = Stream::default();
        let own = |token, head, k| x.at(&[token, head, k]);
        let (w_uk, w_uv) = (model.w_uk, model.w_uv);
        match self.operator {
            Operator::AbsorbQ => {
                let (q_nope, out) = (of_heads(nope), output(latent));
                let args = AbsorbQArgs {
                    q_nope: q_nope.tensor(),
                    w_uk,
                    q_latent: out.tensor(),
                };
                session.absorb_q(&args, stream).unwrap();
                let weight = |head, k, n| model.w_uk(head, k, n);
                self.compare(&out, own, weight, nope);
                assert!(q_nope.is_untouched());
            }
            Operator::ProjectO => {
                let (o_latent, out) = (of_heads(latent), output(value));
                let args = ProjectOArgs {
                    o_latent: o_latent.tensor(),
                    w_uv,
                    out: out.tensor(),
                };
                session.project_o(&args, stream).unwrap();
                let weight = |head, k, n| model.w_uv(head, k, n);
                self.compare(&out, own, weight, latent);
                assert!(o_latent.is_untouched());
            }
            Operator::UpProject => {
                let view = rows(self.dtype, [self.tokens, 1, latent], self.layout);
                let view = View {
                    shape: vec![self.tokens, latent],
                    strides: vec![view.strides[0], 1],
                    ..view
                };
                let kv_c = Resident::new(memory, x.image(view));
                let (k_nope, v) = (output(nope), output(value));
                let args = UpProjectArgs {
                    kv_c: kv_c.tensor(),
                    w_uk: Some(w_uk),
                    w_uv: Some(w_uv),
                    k_nope: Some(k_nope.tensor()),
                    v: Some(v.tensor()),
                };
                session.up_project(&args, stream).unwrap();
                let shared = |token, _, k| x.at(&[token, k]);
                self.compare(&k_nope, shared, |head, k, n| model.w_uk(head, n, k), latent);
                self.compare(&v, shared, |head, k, n| model.w_uv(head, k, n), latent);
                assert!(kv_c.is_untouched());
            }
        }
        assert!(model.is_untouched(), "{self:?}: a weight changed");
    }

    fn compare(
        &self,
        out: &Resident<'_>,
        x: impl Fn(i64, i64, i64) -> f64,
        weight: impl Fn(i64, i64, i64) -> f64,
        depth: i64,
    ) {
        let product = Product {
            x: &x,
            weight: &weight,
            depth,
        };
        let mut current = out.current();
        for head in 0..self.heads {
            self.compare_head(&current, &product, head);
        }
        let shape = out.image().view.shape.clone();
        for_each_index(&shape, |at| current.put(at, out.image().bits(at)));
        assert!(
            current.bytes == out.image().bytes,
            "{self:?}: memory between the rows changed"
        );
    }

    fn compare_head(&self, got: &Image, product: &Product<'_>, head: i64) {
        let columns = got.view.shape[2];
        let weight: Vec<f64> = (0..product.depth * columns)
            .map(|i| (product.weight)(head, i / columns, i % columns))
            .collect();
        for token in 0..self.tokens {
            let (mut sums, mut magnitudes) =
                (vec![0.0; columns as usize], vec![0.0; columns as usize]);
            for k in 0..product.depth {
                let x = (product.x)(token, head, k);
                let row = &weight[(k * columns) as usize..][..columns as usize];
                for (n, w) in row.iter().enumerate() {
                    sums[n] += x * w;
                    magnitudes[n] += (x * w).abs();
                }
            }
            for n in 0..columns as usize {
                let t = magnitudes[n] * SUM_ERROR;
                let bounds = [sums[n] - t, sums[n] + t].map(|bound| rounded(self.dtype, bound));
                let value = got.value(&[token, head, n as i64]);
                assert!(
                    bounds[0] <= value && value <= bounds[1],
                    "{self:?} [{token}, {head}, {n}]: {value} is not {}",
                    sums[n]
                );
            }
        }
    }
}

/// Every operator with every size: in each layout and order of weights, the types in turn.
pub fn grid(types: &[DType], sizes: &[(i64, i64, [i64; 3])]) -> Vec<Case> {
    let layouts = [
        Layout::Compact,
        Layout::HeadMajor,
        Layout::Gapped(64),
        Layout::Gapped(3),
    ];
    let orders = [Weights::Compact, Weights::Parts, Weights::Scattered];
    let mut cases = Vec::new();
    for &(tokens, heads, widths) in sizes {
        for operator in [Operator::AbsorbQ, Operator::ProjectO, Operator::UpProject] {
            for (n, layout) in layouts.into_iter().enumerate() {
                for (m, weights) in orders.into_iter().enumerate() {
                    cases.push(Case {
                        operator,
                        dtype: types[(n + m + cases.len() / 12) % types.len()],
                        tokens,
                        heads,
                        widths,
                        layout,
                        weights,
                    });
                }
            }
        }
    }
    cases
}
