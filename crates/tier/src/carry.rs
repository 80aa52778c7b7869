//! Carries out a plan, turn by turn: demotions first, then the promotions that these make room for.
//!
//! Before: a plan, and a caller that moves pages. After: what could be moved was, and the caller knows which
//! promotions that were.
//! Threads: none. Units: pages. Promise: a page is promoted only into memory that was free, or that its partner has
//! left; a page whose partner is of a program that the kernel refuses to move stays where it is. A full slow tier keeps
//! no page in it that has room in the fast one.

use std::collections::HashSet;
use std::io;

use ballast_ranges::relocate::{Plan, Tier};

use crate::all::place;
use crate::mover::Became;

/// Moves pages to a tier and reports the result for each. Returns whether it has room for more.
pub(crate) type Carry<'a> = dyn FnMut(Tier, &[u64], &mut dyn FnMut(u64, Became)) -> io::Result<bool> + 'a;

/// Moves at most `turn` pages at a time each way. Returns the promotions that were made, by their index in the plan,
/// and the error that ended it, if one did.
pub(crate) fn carry_out(plan: &Plan, turn: usize, carry: &mut Carry<'_>) -> (Vec<usize>, io::Result<()>) {
    let turn = turn.max(1);
    // Demotions after which there is room, promotions that were made, and programs that may not be moved.
    let (mut freed, mut made, mut refused) = (HashSet::new(), HashSet::new(), HashSet::new());
    let (mut slow_is_full, mut result) = (false, Ok(()));
    // What must be free before anything is promoted.
    let ahead = plan.demote.len().saturating_sub(plan.promote.len());
    let turns = (plan.demote.len() - ahead).max(plan.promote.len()).div_ceil(turn);
    let part = |list: &[u64], from: usize| from.min(list.len())..(from + turn).min(list.len());
    let of_turn = (0..turns).map(|at| (part(&plan.demote, ahead + at * turn), part(&plan.promote, at * turn)));
    'turns: for (demote, promote) in std::iter::once((0..ahead, 0..0)).chain(of_turn) {
        for (to, part) in [(Tier::Slow, demote), (Tier::Fast, promote)] {
            let (own, other) = match to {
                Tier::Slow => (&plan.demote, &plan.promote),
                Tier::Fast => (&plan.promote, &plan.demote),
            };
            let goes = |at: &usize| {
                let partner = plan.partner(to, *at).and_then(|partner| other.get(partner));
                let is_refused = |page: u64| refused.contains(&place(page).0);
                let is_open = partner.is_none_or(|partner| match to {
                    Tier::Slow => !is_refused(*partner),
                    Tier::Fast => freed.contains(partner),
                });
                is_open && !is_refused(own[*at])
            };
            let pages: Vec<u64> = part.filter(goes).map(|at| own[at]).collect();
            if pages.is_empty() || (to == Tier::Slow && slow_is_full) {
                continue;
            }
            let has_room = carry(to, &pages, &mut |page, became| match (to, became) {
                (_, Became::Refused) => drop(refused.insert(place(page).0)),
                (Tier::Slow, Became::In(Tier::Slow) | Became::Gone) => drop(freed.insert(page)),
                (Tier::Fast, Became::In(Tier::Fast)) => drop(made.insert(page)),
                _ => (),
            });
            match (has_room, to) {
                (Ok(true), _) => (),
                // Promotions that wait for no demotion make room there, for the next plan.
                (Ok(false), Tier::Slow) => slow_is_full = true,
                (Ok(false), Tier::Fast) => break 'turns,
                (Err(error), _) => {
                    result = Err(error);
                    break 'turns;
                }
            }
        }
    }
    let made = (0..plan.promote.len()).filter(|at| made.contains(&plan.promote[*at])).collect();
    (made, result)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::all::INDEX;

    /// A page of a program.
    fn page(program: u64, number: u64) -> u64 {
        program << INDEX | number << 12
    }

    /// Carries out a plan where the kernel says this of each page. Returns the moves that were asked for, and the
    /// promotions that were made.
    fn asked(plan: &Plan, turn: usize, became: impl Fn(Tier, u64) -> Became) -> (Vec<(Tier, Vec<u64>)>, Vec<usize>) {
        let mut asked = Vec::new();
        let (made, result) = carry_out(plan, turn, &mut |to, pages, each| {
            asked.push((to, pages.to_vec()));
            pages.iter().for_each(|page| each(*page, became(to, *page)));
            Ok(true)
        });
        result.expect("carried out");
        (asked, made)
    }

    fn pairs(count: u64) -> Plan {
        // Program 0's pages go up, program 1's go down.
        let pages = |program| (0..count).map(|number| page(program, number)).collect();
        Plan { promote: pages(0), demote: pages(1), gains: vec![1.0; count as usize] }
    }

    #[test]
    fn a_page_whose_partner_stays_is_not_promoted() {
        let plan = pairs(3);
        let stays = page(1, 1);
        let (asked, made) = asked(&plan, 9, |to, page| if page == stays { Became::Stays } else { Became::In(to) });
        assert_eq!(asked, [(Tier::Slow, plan.demote.clone()), (Tier::Fast, vec![page(0, 0), page(0, 2)])]);
        assert_eq!(made, [0, 2]);
    }

    #[test]
    fn after_a_refusal_nothing_more_of_that_program_moves_nor_what_it_would_change_places_with() {
        let refuse =
            |program| move |to, page: u64| if place(page).0 == program { Became::Refused } else { Became::In(to) };
        let mut plan = pairs(4);
        // The third pair is of a third program.
        (plan.promote[2], plan.demote[2]) = (page(2, 0), page(2, 1));
        let (asked_for, made) = asked(&plan, 1, refuse(1));
        let third = [(Tier::Slow, vec![page(2, 1)]), (Tier::Fast, vec![page(2, 0)])];
        assert_eq!(asked_for[0], (Tier::Slow, vec![page(1, 0)]), "it is refused");
        assert_eq!((&asked_for[1..], made), (&third[..], vec![2]));
        // Refused on the way up: what has gone down stays there, and no more goes.
        let (asked_for, made) = asked(&plan, 1, refuse(0));
        assert_eq!(asked_for[..2], [(Tier::Slow, vec![page(1, 0)]), (Tier::Fast, vec![page(0, 0)])]);
        assert_eq!((&asked_for[2..], made), (&third[..], vec![2]));
    }

    #[test]
    fn what_is_owed_goes_down_first_and_what_has_room_goes_up_without_a_partner() {
        let mut plan = pairs(2);
        plan.demote.insert(0, page(3, 0));
        let (asked_for, made) = asked(&plan, 1, |to, _| Became::In(to));
        assert_eq!(asked_for[0], (Tier::Slow, vec![page(3, 0)]));
        assert_eq!((asked_for.len(), made), (5, vec![0, 1]));
        let mut plan = pairs(2);
        plan.promote.insert(0, page(3, 0));
        let (asked_for, made) = asked(&plan, 1, |to, _| if to == Tier::Slow { Became::Stays } else { Became::In(to) });
        assert_eq!(asked_for.last(), Some(&(Tier::Slow, vec![page(1, 1)])));
        assert_eq!((asked_for[1].clone(), made), ((Tier::Fast, vec![page(3, 0)]), vec![0]));
    }

    #[test]
    fn a_tier_without_room_ends_it() {
        let mut calls = 0;
        let (made, result) = carry_out(&pairs(3), 1, &mut |_, _, _| {
            calls += 1;
            Ok(false)
        });
        result.expect("carried out");
        assert_eq!((calls, made), (1, Vec::new()));
        // Up: what has gone down stays there.
        let (mut calls, mut up) = (Vec::new(), pairs(3));
        up.promote.insert(0, page(3, 0));
        let (made, _) = carry_out(&up, 1, &mut |to, pages, each| {
            calls.push(to);
            pages.iter().filter(|_| to == Tier::Slow).for_each(|page| each(*page, Became::In(to)));
            Ok(to == Tier::Slow)
        });
        assert_eq!((calls, made), (vec![Tier::Slow, Tier::Fast], Vec::new()));
    }

    #[test]
    fn a_full_slow_tier_ends_demotions_and_what_waits_for_none_or_for_those_that_were_made_is_promoted() {
        let mut plan = pairs(4);
        plan.promote.insert(0, page(3, 0));
        let mut asked = Vec::new();
        let (made, result) = carry_out(&plan, 2, &mut |to, pages, each| {
            asked.push((to, pages.to_vec()));
            // One page fits into the slow tier.
            let fits = |page: &u64| to == Tier::Fast || *page == plan.demote[0];
            pages.iter().filter(|page| fits(page)).for_each(|page| each(*page, Became::In(to)));
            Ok(to == Tier::Fast)
        });
        result.expect("carried out");
        assert_eq!(asked, [(Tier::Slow, plan.demote[..2].to_vec()), (Tier::Fast, plan.promote[..2].to_vec())]);
        assert_eq!(made, [0, 1]);
        // Without a pair all of them go, over several turns.
        let plan = Plan { demote: vec![page(1, 0)], gains: Vec::new(), ..plan };
        let (made, _) = carry_out(&plan, 2, &mut |to, pages, each| {
            pages.iter().filter(|_| to == Tier::Fast).for_each(|page| each(*page, Became::In(to)));
            Ok(to == Tier::Fast)
        });
        assert_eq!(made, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn what_was_promoted_before_an_error_is_known() {
        let plan = pairs(3);
        let mut calls = 0;
        let (made, result) = carry_out(&plan, 1, &mut |to, pages, each| {
            calls += 1;
            if calls > 3 {
                return Err(io::ErrorKind::NotFound.into());
            }
            pages.iter().for_each(|page| each(*page, Became::In(to)));
            Ok(true)
        });
        assert_eq!((made, result.expect_err("the fourth call's").kind()), (vec![0], io::ErrorKind::NotFound));
    }
}
