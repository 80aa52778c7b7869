//! Carries out a plan, turn by turn: demotions first, then the promotions that these make room for.
//!
//! Before: a plan, and a caller that moves pages. After: the pages that could be moved were, and the caller knows the
//! promotions among these moves.
//! Threads: none. Units: pages. Promise: a page is promoted only into memory that was free, or that its partner has
//! left; a page whose partner is of a program that the kernel refuses to move stays where it is. A full slow tier keeps
//! no page that has room in the fast tier, and no page that is hotter than one there: while the fast tier's reserve is
//! whole, the promotions of a turn go first, into the reserve, and their partners follow into the memory that these
//! have left.

use std::collections::HashSet;
use std::io;
use std::ops::Range;

use ballast_ranges::relocate::{Plan, Tier};

use crate::all::place;
use crate::mover::Became;

/// Moves pages to a tier and reports the result for each. Returns whether it has room for more.
pub(crate) type Carry<'a> = dyn FnMut(Tier, &[u64], &mut dyn FnMut(u64, Became)) -> io::Result<bool> + 'a;

/// Moves at most `turn` pages at a time each way, which are at most as many as the fast tier's reserve has. Returns the
/// promotions that were made, by their index in the plan, and the error that ended the turns, if one did.
pub(crate) fn carry_out(plan: &Plan, turn: usize, carry: &mut Carry<'_>) -> (Vec<usize>, io::Result<()>) {
    let mut carried = Carried {
        plan,
        carry,
        freed: HashSet::new(),
        kept: HashSet::new(),
        made: HashSet::new(),
        refused: HashSet::new(),
    };
    let result = carried.all(turn.max(1));
    let made = (0..plan.promote.len()).filter(|at| carried.made.contains(&plan.promote[*at])).collect();
    (made, result)
}

struct Carried<'a, 'c> {
    plan: &'a Plan,
    carry: &'a mut Carry<'c>,
    /// Pages that have left the fast tier, and pages that stay in it.
    freed: HashSet<u64>,
    kept: HashSet<u64>,
    made: HashSet<u64>,
    refused: HashSet<usize>,
}

impl Carried<'_, '_> {
    fn all(&mut self, turn: usize) -> io::Result<()> {
        let (demote, promote) = (self.plan.demote.len(), self.plan.promote.len());
        let part = |from: usize, end: usize| from.min(end)..(from + turn).min(end);
        // Demotions that must be made before any promotion. Until they are, the reserve has nothing to lend.
        let ahead = demote.saturating_sub(promote);
        let mut lends = ahead == 0;
        let mut slow_is_full = !self.go(Tier::Slow, &self.down(0..ahead))?;
        for at in (0..promote.max(demote - ahead)).step_by(turn) {
            if !slow_is_full {
                slow_is_full = !self.go(Tier::Slow, &self.down(part(ahead + at, demote)))?;
            }
            let is_lent = slow_is_full && lends;
            let up = self.up(part(at, promote), is_lent);
            let has_room = self.go(Tier::Fast, &up.iter().map(|(page, _)| *page).collect::<Vec<_>>())?;
            if is_lent {
                let made = up.iter().filter(|(page, _)| self.made.contains(page)).filter_map(|(_, partner)| *partner);
                let left: Vec<u64> = made.filter(|partner| !self.freed.contains(partner)).collect();
                self.go(Tier::Slow, &left)?;
                lends = left.iter().all(|page| self.freed.contains(page));
            }
            if !has_room {
                break;
            }
        }
        Ok(())
    }

    /// Moves these pages, and returns whether there is room for more.
    fn go(&mut self, to: Tier, pages: &[u64]) -> io::Result<bool> {
        if pages.is_empty() {
            return Ok(true);
        }
        (self.carry)(to, pages, &mut |page, became| match (to, became) {
            (_, Became::Refused) => drop(self.refused.insert(place(page).0)),
            (Tier::Slow, Became::In(Tier::Slow) | Became::Gone) => drop(self.freed.insert(page)),
            (Tier::Slow, Became::Stays) => drop(self.kept.insert(page)),
            (Tier::Fast, Became::In(Tier::Fast)) => drop(self.made.insert(page)),
            _ => (),
        })
    }

    fn is_refused(&self, page: u64) -> bool {
        self.refused.contains(&place(page).0)
    }

    /// Demotions of this part that are to be made.
    fn down(&self, part: Range<usize>) -> Vec<u64> {
        let goes = |at: &usize| {
            let partner = self.plan.partner(Tier::Slow, *at).and_then(|partner| self.plan.promote.get(partner));
            !self.is_refused(self.plan.demote[*at]) && partner.is_none_or(|partner| !self.is_refused(*partner))
        };
        part.filter(goes).map(|at| self.plan.demote[at]).collect()
    }

    /// Promotions of this part that are to be made, with their partners: those for which there is room, or
    /// (`is_lent`) also those whose partners may still go.
    fn up(&self, part: Range<usize>, is_lent: bool) -> Vec<(u64, Option<u64>)> {
        let with_partner = |at: usize| {
            let partner = self.plan.partner(Tier::Fast, at).and_then(|partner| self.plan.demote.get(partner));
            (self.plan.promote[at], partner.copied())
        };
        let may_go = |page: &u64| is_lent && !self.kept.contains(page) && !self.is_refused(*page);
        let goes = |(page, partner): &(u64, Option<u64>)| {
            let is_open = partner.is_none_or(|partner| self.freed.contains(&partner) || may_go(&partner));
            is_open && !self.is_refused(*page)
        };
        part.map(with_partner).filter(goes).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::all::INDEX;

    fn page(program: u64, number: u64) -> u64 {
        program << INDEX | number << 12
    }

    /// Carries out a plan where the kernel says this of each page. Returns the moves, and the promotions made.
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
        // The third pair belongs to a third program.
        (plan.promote[2], plan.demote[2]) = (page(2, 0), page(2, 1));
        let (asked_for, made) = asked(&plan, 1, refuse(1));
        let third = [(Tier::Slow, vec![page(2, 1)]), (Tier::Fast, vec![page(2, 0)])];
        assert_eq!(asked_for[0], (Tier::Slow, vec![page(1, 0)]), "it is refused");
        assert_eq!((&asked_for[1..], made), (&third[..], vec![2]));
        // Refused on the way up: pages that have gone down stay there, and no more go.
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
        assert_eq!((calls, made), (2, Vec::new()), "each tier once");
        // No room on the way up: pages that have gone down stay there.
        let (mut calls, mut up) = (Vec::new(), pairs(3));
        up.promote.insert(0, page(3, 0));
        let (made, _) = carry_out(&up, 1, &mut |to, pages, each| {
            calls.push(to);
            pages.iter().filter(|_| to == Tier::Slow).for_each(|page| each(*page, Became::In(to)));
            Ok(to == Tier::Slow)
        });
        assert_eq!((calls, made), (vec![Tier::Slow, Tier::Fast], Vec::new()));
    }

    type Moved = Vec<(Tier, Vec<u64>)>;

    /// Carries out a plan where a number of pages fits into each tier beside those that leave it. Returns the moves,
    /// the promotions among them, and the least room that the fast tier had.
    fn with_room(plan: &Plan, turn: usize, fast: usize, slow: usize) -> (Moved, Vec<usize>, usize) {
        let (mut moved, mut room, mut least) = (Vec::new(), (fast, slow), fast);
        let (made, result) = carry_out(plan, turn, &mut |to, pages, each| {
            let (own, other) = if to == Tier::Fast { (&mut room.0, &mut room.1) } else { (&mut room.1, &mut room.0) };
            let goes = &pages[..pages.len().min(*own)];
            (*own, *other) = (*own - goes.len(), *other + goes.len());
            least = least.min(room.0);
            goes.iter().for_each(|page| each(*page, Became::In(to)));
            moved.push((to, goes.to_vec()));
            Ok(goes.len() == pages.len())
        });
        result.expect("carried out");
        (moved, made, least)
    }

    #[test]
    fn a_full_slow_tier_takes_what_has_changed_places_through_the_reserve_a_turn_at_a_time() {
        let plan = pairs(6);
        let (moved, made, least) = with_room(&plan, 2, 4, 0);
        assert_eq!((made, least), ((0..6).collect(), 2));
        let down = |list: &[(Tier, Vec<u64>)]| {
            let of = list.iter().filter(|(to, _)| *to == Tier::Slow).flat_map(|(_, pages)| pages.clone());
            of.collect::<Vec<_>>()
        };
        assert_eq!(down(&moved), plan.demote);
        // One page fits, and one that has room goes up beside the pairs.
        let mut plan = pairs(4);
        plan.promote.insert(0, page(3, 0));
        let (moved, made, _) = with_room(&plan, 2, 5, 1);
        assert_eq!((down(&moved), made), (plan.demote, vec![0, 1, 2, 3, 4]));
        // Without a pair all of them go, over several turns.
        let plan = Plan { demote: vec![page(1, 0)], gains: Vec::new(), ..plan };
        assert_eq!(with_room(&plan, 2, 5, 0).1, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_slow_tier_that_stays_full_is_lent_one_turn_of_the_reserve_and_nothing_while_that_is_owed() {
        let mut plan = pairs(6);
        let full = |plan: &Plan| {
            let (mut up, kept) = (0, page(1, 1));
            let (made, result) = carry_out(plan, 2, &mut |to, pages, each| {
                up += if to == Tier::Fast { pages.len() } else { 0 };
                pages.iter().filter(|_| to == Tier::Fast).for_each(|page| each(*page, Became::In(to)));
                // This one would stay in any case.
                pages.iter().filter(|page| **page == kept).for_each(|page| each(*page, Became::Stays));
                Ok(to == Tier::Fast)
            });
            result.expect("carried out");
            (up, made)
        };
        assert_eq!(full(&plan), (1, vec![0]));
        plan.demote.insert(0, page(3, 0));
        assert_eq!(full(&plan), (0, vec![]), "the reserve is not whole");
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
