//! Divides a budget: finds the optimum exactly.
//!
//! Before: a policy says how much each VM wants (its weight), and its bounds. After: limits. Units: whole pages.
//!
//! Maestro (section 2) asks for the limits `l` that minimise the sum of `s (d / l)^2`, where `d` is a VM's demand and
//! `s` its shares, such that the sum of `l` is at most the budget and `lo <= l <= hi`. The sum is convex and falls in
//! each `l`, so the budget is used up unless each VM is at `hi`. With a Lagrange multiplier `m` for the budget, a VM at
//! neither bound has `2 s d^2 / l^3 = m`, that is `l = c w` with `w = cbrt(s d^2)` and one `c` for all; the others are
//! at the bound that `c w` has passed. So only `c` is unknown. The sum of `clamp(c w, lo, hi)` is a rising, piecewise
//! linear function of `c`: a search among the points where a VM leaves or meets a bound (changes of the active set)
//! finds the piece in which the sum is the budget, and one division gives `c` there. No tolerance is needed.

/// A VM in the solver.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part {
    /// Least pages.
    pub lo: u64,
    /// Most pages; not below `lo`.
    pub hi: u64,
    /// Its multiple of `c`, positive.
    pub weight: f64,
}

/// The weight of a VM in Maestro's sum.
pub fn weight(shares: u32, demand_pages: f64) -> f64 {
    (f64::from(shares.max(1)) * demand_pages.max(1.0).powi(2)).cbrt()
}

/// Divides `budget` pages. All get `hi` if there is enough, and `lo` if that is too much: the caller ensures it fits.
pub fn solve(parts: &[Part], budget: u64) -> Vec<u64> {
    let total = |of: fn(&Part) -> u64| sum(parts.iter().map(of));
    if total(|part| part.hi) <= budget {
        return parts.iter().map(|part| part.hi).collect();
    }
    if total(|part| part.lo) >= budget {
        return parts.iter().map(|part| part.lo).collect();
    }
    let c = multiple(parts, budget as f64);
    let mut limits: Vec<u64> = parts.iter().map(|part| ((c * sane(part)) as u64).clamp(part.lo, part.hi)).collect();
    // Rounding down leaves some pages; floating point may also round up, by about a page.
    let mut over = sum(limits.iter().copied()).saturating_sub(budget);
    for (limit, part) in limits.iter_mut().zip(parts) {
        let back = over.min(*limit - part.lo);
        *limit -= back;
        over -= back;
    }
    limits
}

pub(crate) fn sum(numbers: impl IntoIterator<Item = u64>) -> u64 {
    numbers.into_iter().fold(0, u64::saturating_add)
}

fn sane(part: &Part) -> f64 {
    if part.weight.is_finite() { part.weight.max(f64::MIN_POSITIVE) } else { 1.0 }
}

/// The `c` for which the clamped sum is the budget, which lies between the sums of `lo` and `hi`.
fn multiple(parts: &[Part], budget: f64) -> f64 {
    let at = |c: f64| parts.iter().map(|part| (c * sane(part)).clamp(part.lo as f64, part.hi as f64)).sum::<f64>();
    let leaves = |part: &Part| part.lo as f64 / sane(part);
    let meets = |part: &Part| part.hi as f64 / sane(part);
    let mut turns: Vec<f64> = parts.iter().flat_map(|part| [leaves(part), meets(part)]).collect();
    turns.sort_by(f64::total_cmp);
    let next = turns.partition_point(|c| at(*c) < budget);
    let end = turns.get(next).copied().unwrap_or(f64::MAX);
    let start = next.checked_sub(1).map_or(0.0, |last| turns[last]);
    // The active set of the piece from `start` to `end`: the parts that grow in it. All others are at a bound.
    let (mut fixed, mut slope) = (0.0, 0.0);
    for part in parts {
        if leaves(part) <= start && meets(part) >= end {
            slope += sane(part);
        } else {
            fixed += (start * sane(part)).clamp(part.lo as f64, part.hi as f64);
        }
    }
    if slope > 0.0 { ((budget - fixed) / slope).clamp(start, end) } else { start }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_demands_share_equally_and_bounds_give_the_rest_to_others() {
        let part = |lo, hi| Part { lo, hi, weight: 1.0 };
        assert_eq!(solve(&[part(0, 100), part(0, 100)], 100), [50, 50]);
        assert_eq!(solve(&[part(0, 20), part(0, 100)], 100), [20, 80]);
        assert_eq!(solve(&[part(70, 100), part(0, 100)], 100), [70, 30]);
        assert_eq!(solve(&[part(0, 100), part(0, 100)], 300), [100, 100]);
        assert_eq!(solve(&[part(70, 100), part(70, 100)], 100), [70, 70]);
        assert_eq!(solve(&[], 5), Vec::<u64>::new());
    }

    #[test]
    fn memory_follows_the_cube_root_of_shares_times_demand_squared() {
        let part = |shares, demand| Part { lo: 0, hi: 1 << 40, weight: weight(shares, demand) };
        let limits = solve(&[part(1000, 8000.0), part(1000, 1000.0)], 5000);
        assert_eq!(limits, [4000, 1000]);
        let limits = solve(&[part(8000, 1000.0), part(1000, 1000.0)], 3000);
        assert_eq!(limits, [2000, 1000]);
    }

    #[test]
    fn weights_of_every_size_keep_the_budget() {
        let weights = [f64::MIN_POSITIVE, 1e-9, 1.0, 1e300, f64::NAN, f64::INFINITY];
        let parts: Vec<Part> = weights.iter().map(|weight| Part { lo: 3, hi: 1000, weight: *weight }).collect();
        let limits = solve(&parts, 2500);
        assert!(
            limits.iter().sum::<u64>() <= 2500 && limits.iter().all(|limit| (3..=1000).contains(limit)),
            "{limits:?}"
        );
    }
}
