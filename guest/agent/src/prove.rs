//! Proof that a number names one page on host and guest: the agent writes the host's nonce into its own page.
//!
//! Before: the host names pieces of guest-physical memory and a nonce. After: in as many pieces as possible there is a
//! page that begins with the nonce, and the host knows which page it is.
//! Promise: the proof takes little memory, and for a moment only. A piece in which the kernel gives no page is left
//! out, and the host asks again.

use ballast_messages::Run;
use ballast_messages::message::NONCE;

use crate::owned::Owned;
use crate::vital;

/// Pages tried at a time, and tries for each node: 16 MiB together.
const AT_ONCE: usize = 64;
const TRIES: usize = 64;

/// Pages with the nonce. They stay as they are until the next proof.
#[derive(Debug, Default)]
pub struct Proof(Vec<Owned>);

impl Proof {
    /// Finds pages of the agent in these pieces, at most one for each, and writes the nonce into them.
    pub fn find(&mut self, nonce: &[u8; NONCE], pieces: &[Run]) -> Vec<Run> {
        self.0.clear();
        let mut open = pieces.to_vec();
        let (mut found, mut tried) = (Vec::new(), Vec::new());
        for node in vital::nodes() {
            for _ in 0..TRIES {
                if open.is_empty() || vital::spare(node.node) < node.pages / 16 + AT_ONCE as u64 {
                    break;
                }
                let Ok(mut owned) = Owned::new(AT_ONCE, Some(node.node)) else { break };
                let Ok(frames) = owned.frames() else { return found };
                let mut keep = false;
                for (index, frame) in frames.into_iter().enumerate() {
                    let piece = open.iter().position(|piece| (piece.page..piece.end()).contains(&frame));
                    if let Some(at) = piece {
                        open.swap_remove(at);
                        owned.write(index, nonce);
                        found.push(Run::of(frame, 1));
                        keep = true;
                    }
                }
                // Pages in no piece are kept for now, so that the kernel does not give the same ones again.
                if keep { self.0.push(owned) } else { tried.push(owned) }
            }
        }
        found
    }
}
